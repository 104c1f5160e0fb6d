"""Check whether a network trained with filter dropout reaches the accuracy of plain training.

    python benchmarks/learning.py --network digits_cnn --lrs 0.01 0.02 0.05 > learning.jsonl

Each line is one run at one rate, with new filters in every mini-batch: the test accuracy of the
*full* network after each epoch, and at the end also with running batch-norm statistics. The latest
results are in docs/elastic.md.
"""

import argparse
import itertools
import json
import math
import time

import torch

import pliant as pl
from pliant.engine.evaluation import Evaluation, evaluate
from pliant.methods.base import make_cross_entropy
from pliant.nn.norm_statistics import ReestimatedStats, RunningStats
from pliant.rng import derive_seed


def train(name: str, rate: float, lr: float, seed: int, options: argparse.Namespace) -> dict:
    data = pl.data.load_dataset(options.data).share(pl.Iid(), devices=1, seed=0, proxy=1000)
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(seed, "weights"))
        net = pl.models.MODELS[name](classes=10, channels=data.train.pixels.shape[1])
    elastic_net = pl.elastic(net, data.train.get_normalised(slice(0, 1)))
    trainer = pl.SubnetTrainer(
        elastic_net, pl.get_params(net), pl.Sgd(lr=lr, momentum=0.9, weight_decay=5e-4, clip=5.0)
    )
    curve, step, start = [], 0, time.perf_counter()
    for epoch in range(options.epochs):
        epoch_lr = lr * (1 + math.cos(math.pi * epoch / options.epochs)) / 2
        for x, y in pl.data.make_batches(data.train, data.shares[0], 32, seed, epoch):
            trainer.switch(
                elastic_net.draw(rate, pl.rng_stream(seed, "dropout", step), options.choice)
            )
            trainer.step(x, make_cross_entropy(y), lr=epoch_lr)
            step += 1
        params = trainer.params()
        score = evaluate(net, params, data, Evaluation(statistics=ReestimatedStats()))
        curve.append(round(score.accuracy, 4))
    running = evaluate(net, params, data, Evaluation(statistics=RunningStats()))
    return {
        "network": name,
        "data": options.data,
        "rate": rate,
        "lr": lr,
        "choice": options.choice,
        "seed": seed,
        "curve": curve,
        "final": curve[-1],
        "final, running statistics": running.accuracy,
        "minutes": round((time.perf_counter() - start) / 60, 2),
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
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed, rate, lr in itertools.product(options.seeds, options.rates, options.lrs):
        print(json.dumps(train(options.network, rate, lr, seed, options)), flush=True)
