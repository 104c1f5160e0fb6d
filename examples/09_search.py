"""Search a table of rates on proxy images, and train with it."""

import pliant as pl
from pliant.table_search import SurrogateSearch

net = pl.models.digits_cnn(classes=10)
data = pl.data.digits().share(pl.Iid(), devices=10, proxy=1000)

# Short trainings measure rate vectors; the table keeps those that no other beats in cost and gain.
# Real searches need hundreds of short trainings: leave the settings out for the defaults.
short = pl.ShortTrainingSettings(batches=4, batch=16, seeds=1, snapshot_batches=4, eval_images=100)
settings = pl.SearchSettings(
    SurrogateSearch(rounds=1, vectors=4, per_round=2), short, corner_seeds=1, fresh_seeds=1, rows=4
)
table = pl.search(net, data.proxy, settings)
for share, rates in zip(table.shares, table.rates, strict=True):
    print(f"{share:4.0%} of the cost: drop", " ".join(f"{rate:.2f}" for rate in rates))

fleet = pl.Fleet(size=10, speed=pl.ChangingTrace(low=0.25, high=1.0, per_round=2.0))
rules = pl.RoundRules(late="partial")
method = pl.Distreal(table, budget="paced")
for record in pl.simulate(
    method, net, data, fleet, rounds=2, settings=pl.RunSettings(per_round=3, rules=rules)
):
    print(f"{record.seconds:.0f} s, {record.utilisation:.0%} used, accuracy {record.accuracy:.3f}")
