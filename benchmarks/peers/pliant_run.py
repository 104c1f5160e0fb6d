"""FedAvg in pliant, inline or in worker processes."""

import time

import numpy as np
from workload import (
    BATCH,
    LR,
    PER_ROUND,
    Curve,
    load_workload,
    make_network,
    read_arguments,
    report,
)

import pliant as pl
from pliant.data import FederatedData


def main() -> None:
    started = time.perf_counter()
    args = read_arguments()
    workload = load_workload(args.data)
    devices, per_device = workload.labels.shape
    train = pl.ImageDataset.from_tensors(workload.images.flatten(0, 1), workload.labels.flatten())
    test = pl.ImageDataset.from_tensors(workload.test_images, workload.test_labels)
    rows = np.arange(devices * per_device).reshape(devices, per_device)
    data = FederatedData(train, test, train.select(rows[0][:0]), tuple(rows), rows[0][:0])
    ends: list[float] = [time.perf_counter()]
    curve: Curve = []
    for record in pl.simulate(
        pl.FedAvg(local=pl.LocalTraining(batch=BATCH, optimiser=pl.Sgd(lr=LR))),
        make_network(),
        data,
        pl.Fleet(size=devices),
        rounds=args.rounds,
        settings=pl.RunSettings(
            per_round=PER_ROUND,
            evaluation=pl.Evaluation(every=args.every or args.rounds, statistics=pl.RunningStats()),
        ),
        workers=pl.ProcessWorkers(args.processes) if args.processes > 1 else pl.InlineWorkers(),
    ):
        ends.append(time.perf_counter())
        if record.accuracy is not None:
            curve.append((ends[-1] - started, record.accuracy))
    report(list(np.diff(ends)), curve, started)


if __name__ == "__main__":
    main()
