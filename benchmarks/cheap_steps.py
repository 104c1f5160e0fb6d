"""Compare what narrow steps, small images and frozen layers cost: MACs and measured time.

    python benchmarks/cheap_steps.py cifar_cnn
    python benchmarks/cheap_steps.py resnet20

Prints shares of the full step at 32x32, on one thread; steps of all kinds take turns. The latest
results are in docs/results/progressive.md.
"""

import argparse
import csv
import sys

import torch

import pliant as pl
from pliant.bench.elastic import make_elastic_step, make_trainer
from pliant.bench.timing import time_interleaved
from pliant.nn.frozen_cost import count_unfrozen_macs, group_params
from pliant.runtime import retain_compiled_kernels, retain_freed_memory

SIDE, WIDTHS, SIDES, FROZEN = 32, (0.75, 0.5), (28, 24, 20, 16), (1, 2)
OPTIONS = {"cifar_cnn": {}, "resnet20": {"width": 8}}  # of the networks, as in the races


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("network", choices=OPTIONS)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    retain_compiled_kernels()
    retain_freed_memory()
    module = pl.models.MODELS[options.network](**OPTIONS[options.network])
    net = pl.elastic(module, torch.zeros(1, 3, SIDE, SIDE))
    kinds = {"full": (1.0, SIDE, 0)}
    kinds |= {f"width {width:g}": (width, SIDE, 0) for width in WIDTHS}
    kinds |= {f"side {side}": (1.0, side, 0) for side in SIDES}
    kinds |= {f"{count} frozen": (1.0, SIDE, count) for count in FROZEN}
    labels = torch.arange(options.batch) % 10
    steps, macs = {}, {}
    for name, (share, side, layers) in kinds.items():
        sized = net.at(side, side)
        subnet = sized.select_prefix(1 - share)
        images = torch.randn(options.batch, 3, side, side)
        trainer = make_trainer(module, sized)
        frozen = frozenset().union(*group_params(net)[:layers])
        trainer.freeze(frozen)
        steps[name] = make_elastic_step(trainer, lambda step, chosen=subnet: chosen, images, labels)
        macs[name] = sized.macs(subnet, training=True)
        if frozen:
            macs[name] = count_unfrozen_macs(sized, frozen)
    times = time_interleaved(steps, seconds=options.seconds)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["step", "MACs", "time"])
    for name in kinds:
        row = macs[name] / macs["full"], times[name] / times["full"]
        writer.writerow([name, *(f"{share:.3f}" for share in row)])


if __name__ == "__main__":
    main()
