"""The workload that all peers run: FedAvg on shared images, in plain PyTorch.

Peers live in environments of their own, without pliant, so this file imports torch and numpy only.
`compare.py` writes the images once; every program reads the same file, trains the same network with
the same settings, and prints one line of JSON.
"""

import argparse
import json
import time
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, LR, PER_ROUND = 32, 0.1, 10


class CifarCnn(nn.Module):
    """Four convolutions with group norm, which every peer can average without special care."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 64, 128)
        layers: list[nn.Module] = []
        for index, (before, after) in enumerate(pairwise(widths)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if index < 3 else []
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean(dim=(2, 3)))


@dataclass(frozen=True)
class Workload:
    """The images of all devices and the test images, normalised."""

    images: Tensor  # (device, image, channel, h, w)
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def get_device(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--every", type=int, default=0, help="rounds; 0: evaluate at the end only")
    return parser.parse_args()


@cache
def load_workload(path: Path) -> Workload:
    """Read the images, once per process."""
    with np.load(path) as arrays:
        parts = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    return Workload(
        normalise(parts["images"]), parts["labels"], normalise(parts["tests"]), parts["test_labels"]
    )


def normalise(pixels: Tensor) -> Tensor:
    return (pixels.float() / 255 - 0.5) / 0.25


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return CifarCnn()


def train(net: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Make one pass over a device's images."""
    optimiser = torch.optim.SGD(net.parameters(), lr=LR)
    net.train()
    for rows in torch.randperm(len(images)).split(BATCH):
        optimiser.zero_grad()
        F.cross_entropy(net(images[rows]), labels[rows]).backward()
        optimiser.step()


@torch.no_grad()
def evaluate(net: nn.Module, workload: Workload) -> float:
    net.eval()
    hits = 0
    for images, labels in zip(
        workload.test_images.split(125), workload.test_labels.split(125), strict=True
    ):
        hits += int((net(images).argmax(dim=1) == labels).sum())
    return hits / len(workload.test_labels)


Curve = list[tuple[float, float]]  # seconds of the whole program so far, and accuracy


def report(seconds: list[float], curve: Curve, started: float) -> None:
    """Print the seconds of each round, all evaluations, and the time of the whole program."""
    whole = time.perf_counter() - started
    print(json.dumps({"rounds": seconds, "curve": curve, "whole": whole}), flush=True)
