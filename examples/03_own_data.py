"""Share your own tensors unequally among devices, and see what each device holds."""

import torch

import pliant as pl
from pliant.data import TrainTestData

generator = torch.Generator().manual_seed(0)
labels = torch.arange(600) % 4
waves = torch.sin(torch.linspace(0, 6.28, 16) * (1 + labels[:, None]))  # each class is a frequency
images = waves[:, None, None, :].repeat(1, 1, 16, 1)
images = images + 0.5 * torch.randn(images.shape, generator=generator)

own_data = TrainTestData(
    train=pl.ImageDataset.from_tensors(images[:500], labels[:500], name="waves"),
    test=pl.ImageDataset.from_tensors(images[500:], labels[500:], name="waves"),
)
data = own_data.share(pl.Dirichlet(alpha=0.3), devices=8, proxy=50)
print(data.summary())

net = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 14 * 14, 4)
)
fleet = pl.Fleet(size=8, speed=pl.ConstantTrace(low=0.5, high=1.0))
settings = pl.RunSettings(per_round=4, rules=pl.RoundRules(late="partial"))
for record in pl.simulate(pl.FedAvg(), net, data, fleet, rounds=3, settings=settings):
    print(record.round, record.accuracy)
