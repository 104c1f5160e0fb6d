"""Split a network between clients and a server: AdaSplit against plain split learning."""

import pliant as pl
from pliant.split.base import SplitTraining

ROUNDS = 6
data = pl.data.digits().share(pl.Iid(), devices=5, proxy=7000)
link = pl.DeviceClass(up=2.5e6, down=5e6, latency=0.02)  # bytes per second: 20 and 40 Mbit/s
fleet = pl.Fleet(size=5, classes=(link,), macs_per_second=1e9)
local = SplitTraining(optimiser=pl.Adam(lr=1e-3), batch=32)
settings = pl.RunSettings(
    rounds=ROUNDS,
    per_round=5,
    rules=pl.RoundRules(late="wait"),
    evaluation=pl.Evaluation(every=ROUNDS),
)

methods = {
    "SL-basic": pl.VanillaSplit(local=local),
    # clients train on their own in the first half of the rounds, then the most useful ones send
    "AdaSplit": pl.AdaSplit(local=local, kappa=0.5),
}
for name, method in methods.items():
    net = pl.models.lenet_small(classes=10, channels=1, side=28)
    records = list(pl.simulate_split(method, net, data, fleet, settings=settings))
    megabytes = sum(record.down + record.up for record in records) / 1e6
    last = records[-1]
    print(f"{name:8}  {last.accuracy:.3f} after {last.seconds:5.1f} s and {megabytes:5.1f} MB")
