"""Tell whether a network that trains under dropout reaches the plateau of plain training.

    python benchmarks/learning.py --network digits_cnn --lrs 0.01 0.02 0.05 > learning.jsonl

Each line is one run: test accuracy of the *full* network after each epoch at one rate, with new
filters in every mini-batch, and for batch norm the accuracy with running and with re-estimated
statistics. Last results are in docs/elastic.md.
"""

import argparse
import itertools
import json
import math
import time

import torch

import pliant as pl
from pliant.engine.evaluate import Evaluation, evaluate
from pliant.methods.base import cross_entropy
from pliant.nn.statistics import Reestimated, Running
from pliant.rng import number


def train(name: str, rate: float, lr: float, seed: int, given: argparse.Namespace) -> dict:
    data = pl.data.load(given.data).share(pl.Iid(), devices=1, seed=0, proxy=1000)
    with torch.random.fork_rng():
        torch.manual_seed(number(seed, "weights"))
        net = pl.models.MODELS[name](classes=10, channels=data.train.pixels.shape[1])
    flexible = pl.elastic(net, data.train.normalised(slice(0, 1)))
    learner = pl.Learner(
        flexible, pl.params_of(net), pl.Sgd(lr=lr, momentum=0.9, weight_decay=5e-4, clip=5.0)
    )
    curve, step, begin = [], 0, time.perf_counter()
    for epoch in range(given.epochs):
        now = lr * (1 + math.cos(math.pi * epoch / given.epochs)) / 2
        for x, y in pl.data.batches(data.train, data.devices[0], 32, seed, epoch):
            learner.switch(flexible.draw(rate, pl.stream(seed, "dropout", step), given.choice))
            learner.step(x, cross_entropy(y), lr=now)
            step += 1
        params = learner.params()
        score = evaluate(net, params, data, Evaluation(statistics=Reestimated()))
        curve.append(round(score.accuracy, 4))
    running = evaluate(net, params, data, Evaluation(statistics=Running()))
    return {
        "network": name,
        "data": given.data,
        "rate": rate,
        "lr": lr,
        "choice": given.choice,
        "seed": seed,
        "curve": curve,
        "final": curve[-1],
        "final, running statistics": running.accuracy,
        "minutes": round((time.perf_counter() - begin) / 60, 2),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="digits_cnn")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0, 0.25, 0.5])
    parser.add_argument("--lrs", type=float, nargs="+", default=[0.02])
    parser.add_argument("--choice", default="bernoulli")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for seed, rate, lr in itertools.product(given.seeds, given.rates, given.lrs):
        print(json.dumps(train(given.network, rate, lr, seed, given)), flush=True)
