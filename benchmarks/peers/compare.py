"""Time the same federated training in pliant and in its peers, on one machine.

    python benchmarks/peers/compare.py --repeats 3        (about 20 minutes)

Needs CIFAR-10 (`pliant data get cifar10`) and a package index: each peer gets an environment of its
own under `--out`. One hundred devices have 480 images each; ten of them make one pass per round
with batch 32. Programs take turns, each repeat in another order, so that a change of the machine's
speed meets all alike. A round's time is the median without the first and the last round; the time
of the whole program includes imports, start-up and one evaluation.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np

from pliant.data import load_dataset

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
    parser.add_argument("--out", type=Path, default=Path("runs/peers"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    data = args.out / "cifar10.npz"
    if not data.exists():
        write_data(data)
    pythons = {
        name: make_environment(args.out / name, packages) for name, packages in PEERS.items()
    }
    results: dict[str, list[dict[str, float]]] = {name: [] for name in PROGRAMS}
    for repeat in range(args.repeats):
        for name in random.Random(repeat).sample(list(PROGRAMS), len(PROGRAMS)):
            environment, program, processes = PROGRAMS[name]
            python = pythons[environment] if environment else Path(sys.executable)
            results[name].append(run(python, program, data, args.rounds, processes))
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


def run(python: Path, program: str, data: Path, rounds: int, processes: int) -> dict[str, float]:
    """Run one program; return the seconds of a round and of the whole, and the accuracy."""
    command = [python, HERE / program, data, "--rounds", str(rounds), "--processes", str(processes)]
    result = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)},
    )
    line = next(line for line in result.stdout.splitlines() if line.startswith("{"))
    output = json.loads(line)
    return {
        "round": statistics.median(output["rounds"][1:-1]),
        "whole": output["whole"],
        "accuracy": output["accuracy"],
    }


def print_table(results: dict[str, list[dict[str, float]]]) -> None:
    print(f"{'program':<22} {'round, s':>9} {'whole, s':>9} {'accuracy, %':>12}")
    for name, repeats in results.items():
        values = [statistics.median(row[key] for row in repeats) for key in repeats[0]]
        print(f"{name:<22} {values[0]:>9.2f} {values[1]:>9.1f} {100 * values[2]:>12.1f}")


if __name__ == "__main__":
    main()
