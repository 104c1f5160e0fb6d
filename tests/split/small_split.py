"""A small LeNet, small images and short split runs."""

from itertools import islice

import numpy as np
import torch

from pliant.data import FederatedData, ImageDataset
from pliant.devices import Fleet
from pliant.engine.evaluation import Evaluation
from pliant.engine.round_loop import RunSettings
from pliant.engine.round_rules import RoundRules
from pliant.engine.split_loop import simulate_split
from pliant.nn.models import lenet
from pliant.split import AdaSplit, SplitTraining
from pliant.split.base import ClientCosts

LOCAL = SplitTraining(batch=8)
ADASPLIT = AdaSplit(local=LOCAL, kappa=0.5)
SIZES = (24, 17, 8)  # the second ends with a batch of one


def make_images(count, seed=0, classes=3):
    """Make noise with a bright row per class, which can be learned in a few steps."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    pixels = torch.randint(0, 128, (count, 1, 16, 16), generator=rng, dtype=torch.uint8)
    pixels[torch.arange(count), 0, 4 * labels] += 127
    return ImageDataset.from_tensors(pixels, labels, classes=classes)


def make_data(sizes=SIZES, only=None):
    """Share images among clients; `only` maps clients to their only class."""
    train, test = make_images(sum(sizes)), make_images(12 * len(sizes), seed=1)
    shares = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    for client, label in (only or {}).items():
        train.labels[shares[client]] = label
    test_shares = tuple(np.split(np.arange(len(test)), len(sizes)))
    proxy = np.zeros(0, np.int64)
    return FederatedData(train, test, train.select([0]), tuple(shares), proxy, test_shares)


def make_network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return lenet(3, filters=(4, 6), hidden=(16, 12), channels=1, side=16)


def make_settings(rounds=4):
    rules, evaluation = RoundRules(late="wait"), Evaluation(every=2)
    return RunSettings(rounds=rounds, rules=rules, evaluation=evaluation, checkpoint_every=2)


class FreeEnvironment:
    """An environment in which nothing takes time."""

    def __init__(self, clients, available=None):
        self.costs = [ClientCosts() for _ in range(clients)]
        self.available = list(range(clients)) if available is None else available

    def available_clients(self):
        return self.available

    def compute(self, client, macs, samples):
        self.costs[client].add_pass(macs, samples)
        return True

    def upload(self, client, size): ...
    def serve(self, clients, macs): ...
    def download(self, client, size): ...
    def transfer(self, senders, receivers, sizes): ...
    def barrier(self): ...


def make_faulty(change):
    """Return a factory of clients whose messages are changed, given the client's number."""

    def make_client(client):
        honest_forward = client.forward
        client.forward = lambda: change(client.number, honest_forward())
        return client

    return make_client


def run(method=ADASPLIT, *, fleet=None, rounds=4, data=None, settings=None, stop=None, **options):
    """Run a method for at most `stop` rounds and return the records."""
    data = data or make_data()
    settings = settings or make_settings(rounds)
    fleet = fleet or Fleet(size=len(data))
    records = simulate_split(method, make_network(), data, fleet, settings=settings, **options)
    return list(islice(records, stop))
