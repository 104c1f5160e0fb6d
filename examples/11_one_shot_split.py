"""Split learning with one exchange: clients train alone, then send all activations once."""

import pliant as pl
from pliant.split.base import SplitTraining

ROUNDS = 3
data = pl.data.digits().share(pl.Iid(), devices=5, proxy=7500)
link = pl.DeviceClass(up=2.5e6, down=5e6, latency=0.02)
fleet = pl.Fleet(size=5, classes=(link,), macs_per_second=1e9)
settings = pl.RunSettings(
    rounds=ROUNDS,
    per_round=5,
    rules=pl.RoundRules(late="wait"),
    evaluation=pl.Evaluation(every=ROUNDS),
)
local = SplitTraining(optimiser=pl.Adam(lr=1e-3), batch=32, period=ROUNDS + 1)

# One round of local training, one transfer; then the server trains on what it has received.
method = pl.OneShotSplit(local=local, local_share=1 / ROUNDS)
net = pl.models.lenet_small(classes=10, channels=1, side=28)
for record in pl.simulate_split(method, net, data, fleet, settings=settings, server_speed=1e12):
    sent = (record.down + record.up) / 1e6
    print(f"round {record.round + 1}: {sent:5.2f} MB sent, accuracy {record.accuracy}")
