"""Time the same federated training in pliant and in its peers, on one machine.

    python benchmarks/peers/compare.py --repeats 3        (about 20 minutes)

Needs CIFAR-10 (`pliant data get cifar10`) and a package index: each peer gets an environment of its
own under `--out`. One hundred devices have 480 images each; ten of them make one pass per round
with batch 32. Programs take turns, each repeat in another order, so that a change of the machine's
speed meets all alike. A round's time is the median without the first and the last round; the time
of the whole program includes imports, start-up and one evaluation.

    python benchmarks/peers/compare.py --programs "pliant, 2 processes" "flower, 2 processes" \\
        --rounds 40 --every 2 --target 0.4

evaluates every second round and adds the seconds to an accuracy, evaluations included. Only these
programs evaluate in between.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import numpy as np

from pliant.data import load_dataset

Result = dict[str, Any]
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DEVICES, PER_DEVICE, TESTS = 100, 480, 10000
PEERS = {  # packages, besides torch
    "pfl": ["pfl[pytorch]==0.6.0"],
    "flower": ["flwr[simulation]==1.41.0"],
}
PROGRAMS = {  # name: environment, program, processes
    "bare loop": (None, "bare_loop.py", 1),
    "pliant, 1 process": (None, "pliant_run.py", 1),
    "pfl, 1 process": ("pfl", "pfl_run.py", 1),
    "pliant, 2 processes": (None, "pliant_run.py", 2),
    "flower, 2 processes": ("flower", "flower_run.py", 2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--every", type=int, default=0, help="rounds between evaluations")
    parser.add_argument("--target", type=float, help="accuracy to reach")
    parser.add_argument("--out", type=Path, default=Path("runs/peers"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    data = args.out / "cifar10.npz"
    if not data.exists():
        write_data(data)
    pythons = {
        name: make_environment(args.out / name, packages)
        for name, packages in PEERS.items()
        if any(PROGRAMS[program][0] == name for program in args.programs)
    }
    results: dict[str, list[Result]] = {name: [] for name in args.programs}
    for repeat in range(args.repeats):
        for name in random.Random(repeat).sample(args.programs, len(args.programs)):
            environment, program, processes = PROGRAMS[name]
            python = pythons[environment] if environment else Path(sys.executable)
            command = [str(python), str(HERE / program), str(data), "--rounds", str(args.rounds)]
            command += ["--processes", str(processes), "--every", str(args.every)]
            results[name].append(run(command, args.target))
            sys.stderr.write(f"{repeat + 1}: {name}: {results[name][-1]}\n")
    print_table(results)
    (args.out / "results.json").write_text(json.dumps(results, indent=1))


def write_data(path: Path) -> None:
    """Write the images of all devices and the test images as arrays."""
    source = load_dataset("cifar10")
    rows = np.random.default_rng(0).permutation(len(source.train))[: DEVICES * PER_DEVICE]
    shape = (DEVICES, PER_DEVICE)
    np.savez(
        path,
        images=source.train.pixels[rows].numpy().reshape(*shape, *source.train.shape),
        labels=source.train.labels[rows].numpy().reshape(shape),
        tests=source.test.pixels[:TESTS].numpy(),
        test_labels=source.test.labels[:TESTS].numpy(),
    )


def make_environment(folder: Path, packages: list[str]) -> Path:
    """Create an environment with torch and a peer, unless it is there; return its Python."""
    python = folder / "bin" / "python"
    if not (folder / ".made").exists():
        venv.create(folder, with_pip=True, clear=True)
        torch = ["-r", str(ROOT / "requirements" / "torch.txt")]
        for wanted in (torch, packages):  # torch first, for the build that fits this machine
            subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
        (folder / ".made").touch()
    return python


def run(command: list[str], target: float | None) -> Result:
    """Run one program; return the seconds of a round and of the whole, and the accuracy."""
    result = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)},
    )
    line = next(line for line in result.stdout.splitlines() if line.startswith("{"))
    output = json.loads(line)
    curve = output["curve"]
    return {
        "round": statistics.median(output["rounds"][1:-1]),
        "whole": output["whole"],
        "accuracy": curve[-1][1],
        "to target": next((at for at, value in curve if target and value >= target), math.inf),
        "curve": curve,
    }


def print_table(results: dict[str, list[Result]]) -> None:
    print(
        f"{'program':<22} {'round, s':>9} {'whole, s':>9} {'accuracy, %':>12} {'to target, s':>13}"
    )
    keys = ("round", "whole", "accuracy", "to target")
    for name, repeats in results.items():
        values = [statistics.median(row[key] for row in repeats) for key in keys]
        cells = f"{values[0]:>9.2f} {values[1]:>9.1f} {100 * values[2]:>12.1f}"
        print(f"{name:<22} {cells} {values[3]:>13.1f}")


if __name__ == "__main__":
    main()
