"""Train a network across devices whose speed changes during a round."""

import pliant as pl

net = pl.models.digits_cnn(classes=10)
data = pl.data.digits().share(pl.Dirichlet(alpha=0.5), devices=20)
fleet = pl.Fleet(size=20, speed=pl.ChangingTrace(low=0.25, high=1.0, per_round=2.0))
method = pl.Distreal(budget="paced")
settings = pl.RunSettings(per_round=5, rules=pl.RoundRules(late="partial"))

for record in pl.simulate(method, net, data, fleet, rounds=3, settings=settings):
    print(f"{record.seconds:6.1f} s  {record.utilisation:4.0%} used  {record.accuracy:.3f}")
