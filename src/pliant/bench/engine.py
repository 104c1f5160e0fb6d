"""`pliant bench engine`: measure the overhead of the engine."""

import gc
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import nn

from pliant.bench.bare import BATCH, LR, open_bare_loop
from pliant.bench.timing import Measurement, run_in_process, time_interleaved
from pliant.data import FederatedData, Iid, ImageDataset
from pliant.data.federated import TrainTestData
from pliant.devices import ChangingTrace, CostRows, Fleet, PerBatch
from pliant.engine.evaluation import Evaluation
from pliant.engine.ledger import RoundRecord
from pliant.engine.round_loop import Run, RunSettings
from pliant.engine.round_rules import RoundRules
from pliant.engine.round_tasks import make_tasks
from pliant.engine.run_store import RunState
from pliant.engine.simulate import simulate
from pliant.engine.simulated_devices import schedule_round
from pliant.engine.split_loop import simulate_split
from pliant.engine.timetable import build_timetable
from pliant.engine.worker_context import build_context
from pliant.methods import Distreal, FedAvg, FedDropout, LocalTraining
from pliant.methods.base import ServerState, Step, Task, Update
from pliant.methods.verbs import Method
from pliant.nn.elastic import Elastic
from pliant.nn.models import densenet40, digits_cnn, femnist_cnn, lenet_small
from pliant.nn.optimisers import Sgd
from pliant.params import get_params
from pliant.split import AdaSplit
from pliant.value import Value
from pliant.workers.pool import AnyWorkers, InlineWorkers, ProcessWorkers, count_cores

PER_ROUND = 10
MakeInputs = Callable[[], tuple[nn.Module, FederatedData]]


class NoTraining(Value, frozen=True):
    """A method that trains nothing, so that only the engine takes time."""

    local: LocalTraining = LocalTraining()

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        delta = {name: torch.zeros_like(tensor) for name, tensor in task.params.items()}
        device, steps_done = task.key.device, ((net.full, 1),)
        return Update(
            device, delta, 1, 1, 1.0, 0.0, num_samples=task.num_samples, subnet_steps=steps_done
        )

    def merge(self, net: Elastic, state: ServerState, updates: Sequence[Update]) -> ServerState:
        return state


def make_tiny() -> tuple[nn.Module, FederatedData]:
    """Make a minimal network, and five mini-batches on each of 100 devices."""
    head = (nn.ReLU(), nn.MaxPool2d(8), nn.Flatten(), nn.Linear(72, 10))
    return nn.Sequential(nn.Conv2d(1, 8, 5), *head), _make_random_data(160, 1, 28)


def make_digits_like(samples: int = 160, hidden: int = 128) -> tuple[nn.Module, FederatedData]:
    """Make the network for the digits, and random images on 100 devices."""
    return digits_cnn(hidden=hidden), _make_random_data(samples, 1, 28)


def make_densenet_like() -> tuple[nn.Module, FederatedData]:
    """Make DenseNet-40, and 160 random images on each of 100 devices."""
    return densenet40(), _make_random_data(160, 3, 32)


def make_cifar_like() -> tuple[nn.Module, FederatedData]:
    """Make two convolutions and two linear layers, and 500 random images on each of 100 devices."""
    return femnist_cnn(10, channels=3, side=32), _make_random_data(500, 3, 32)


def make_large() -> tuple[nn.Module, FederatedData]:
    """Make a network of 25 MB whose steps are cheap, and one image on each of 100 devices."""
    layers = nn.Flatten(), nn.Linear(784, 7800), nn.ReLU(), nn.Linear(7800, 10)
    return nn.Sequential(*layers), _make_random_data(1, 1, 28)


def make_split_like() -> tuple[nn.Module, FederatedData]:
    """Make the small LeNet, and 1,600 random images on each of five clients."""
    return lenet_small(10), _make_random_data(1600, 3, 32, devices=5)


def _make_random_data(samples: int, channels: int, side: int, devices: int = 100) -> FederatedData:
    generator = torch.Generator().manual_seed(0)

    def make_images(count: int) -> ImageDataset:
        shape = (count, channels, side, side)
        pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        return ImageDataset.from_tensors(pixels, torch.arange(count) % 10)

    data = TrainTestData(make_images(devices * samples + 10), make_images(100))
    return data.share(Iid(), devices, proxy=10)


UNLIMITED_ROUNDS = 10**9  # the caller stops the run
EVALUATE_AT_END = Evaluation(every=UNLIMITED_ROUNDS)


def run_rounds(
    method: Method,
    make: MakeInputs,
    *,
    rounds: int = UNLIMITED_ROUNDS,
    per_round: int = PER_ROUND,
    size: int = 100,
    folder: Path | None = None,
    workers: AnyWorkers | None = None,
    evaluation: Evaluation = EVALUATE_AT_END,
) -> Generator[RoundRecord, None, None]:
    """Run with the default settings, but evaluate only at the end."""
    net, data = make()
    yield from simulate(
        method,
        net,
        data,
        Fleet(size=size),
        settings=RunSettings(rounds=rounds, per_round=per_round, evaluation=evaluation),
        workers=workers or InlineWorkers(),
        folder=folder,
        make_inputs=make,
    )


def measure() -> Iterator[Measurement]:
    torch.set_num_threads(1)
    yield from measure_empty_rounds()
    yield from measure_training()
    yield from measure_local_rounds()
    yield from measure_start_up()
    yield from measure_fleet_sizes()
    yield from measure_memory_growth()
    yield from measure_large_rounds()
    yield from measure_timetable()
    yield from measure_schedules()


def measure_empty_rounds(seconds: float = 6.0) -> Iterator[Measurement]:
    """Time rounds of a method that trains nothing, with more work in each row."""
    start = partial(run_rounds, NoTraining())
    with tempfile.TemporaryDirectory() as name:
        kinds = {
            "tiny": start(make_tiny),
            "on disk": start(make_tiny, folder=Path(name, "run")),
            "evaluated": start(make_tiny, folder=Path(name, "evaluated"), evaluation=Evaluation()),
            "digits": start(make_digits_like),
        }
        times = {kind: 1e3 * value for kind, value in _time_rounds(kinds, seconds).items()}
    yield Measurement("round of 10 devices that train nothing", times["tiny"], "ms", 2.0)
    yield Measurement("  records and checkpoints on disk too", times["on disk"], "ms", 5.0)
    yield Measurement("  evaluated on 100 images too", times["evaluated"], "ms")
    yield Measurement("  with the digits' network, sent to and fro", times["digits"], "ms")


def measure_training(seconds: float = 20.0) -> Iterator[Measurement]:
    """Time FedAvg against a bare PyTorch loop with as many worker processes."""
    count = count_cores()
    method = FedAvg(LocalTraining(Sgd(lr=LR), BATCH))
    records = run_rounds(method, make_cifar_like, workers=ProcessWorkers(count))
    with open_bare_loop(make_cifar_like, count, PER_ROUND) as run_bare, closing(records):
        times = time_interleaved(
            {
                "engine": partial(next, records),
                "bare": partial(run_bare, False),
                "bare, last": partial(run_bare, True),
            },
            seconds=seconds,
        )
    engine, bare_loop, channels_last = times.values()
    yield Measurement("FedAvg, 10 of 100 devices with 500 images: a round", engine, "s")
    yield Measurement("  bare PyTorch loop", bare_loop, "s")
    yield Measurement("  engine / bare loop", engine / bare_loop, "", 1.05)
    yield Measurement("  engine / bare loop in channels-last", engine / channels_last)


def measure_local_rounds(seconds: float = 10.0) -> Iterator[Measurement]:
    """Time the local phase of AdaSplit in this process and in two workers."""
    runs = {
        "inline": _run_local_rounds(InlineWorkers()),
        "two": _run_local_rounds(ProcessWorkers(2)),
    }
    inline, two = _time_rounds(runs, seconds).values()
    yield Measurement("AdaSplit's local phase, five clients: a round", two, "s")
    yield Measurement("  two workers / inline", two / inline, "", 1 / 1.7)


def _run_local_rounds(workers: AnyWorkers) -> Generator[RoundRecord, None, None]:
    net, data = make_split_like()
    settings = RunSettings(rounds=UNLIMITED_ROUNDS, rules=RoundRules(late="wait"))
    yield from simulate_split(
        AdaSplit(kappa=1.0),
        net,
        data,
        Fleet(size=len(data)),
        settings=settings,
        workers=workers,
        make_inputs=make_split_like,
    )


def measure_start_up() -> Iterator[Measurement]:
    """Time the first round in a process that has only imported pliant."""
    inline = run_in_process(_time_first_round, InlineWorkers())
    yield Measurement("start-up after imports, inline", inline, "s", 3.0)
    processes = run_in_process(_time_first_round, ProcessWorkers())
    yield Measurement("start-up with worker processes, their imports too", processes, "s")


def measure_fleet_sizes(seconds: float = 4.0) -> Iterator[Measurement]:
    """Compare fleets of a million and a thousand devices."""
    sizes = (1_000, 1_000_000)
    runs = {str(size): run_rounds(NoTraining(), make_tiny, size=size) for size in sizes}
    small, large = _time_rounds(runs, seconds).values()
    yield Measurement("1,000,000 / 1,000 devices, time", large / small, "", 1.1)
    small, large = (run_in_process(_measure_memory, size) for size in sizes)
    yield Measurement("1,000,000 / 1,000 devices, memory", large / small, "", 1.1)


def measure_memory_growth() -> Iterator[Measurement]:
    """Measure the growth of memory over a thousand rounds of training."""
    growth = run_in_process(_measure_growth, 1000)
    yield Measurement("memory at round 1,000 / round 50", growth, "", 1.05)


def measure_large_rounds(few: int = 20, many: int = 400) -> Iterator[Measurement]:
    """Compare the peak memory of rounds with many and few devices, all processes together."""
    for name, workers in (("inline", InlineWorkers()), ("two workers", ProcessWorkers(2))):
        peaks = [run_in_process(_measure_peak, devices, workers) for devices in (few, many)]
        yield Measurement(
            f"peak memory, {many} / {few} devices x 25 MB, {name}", peaks[1] / peaks[0], "", 1.2
        )


def measure_timetable(seconds: float = 2.0) -> Iterator[Measurement]:
    """Time the timetable of a large round."""
    fleet = Fleet(size=10_000, speed=ChangingTrace(per_round=4.0))
    policy = PerBatch(CostRows(tuple(np.linspace(0.1, 1.0, 64).tolist())))
    tasks = make_tasks(np.arange(10_000), num_batches=16, full_macs=10.0)
    build = partial(build_timetable, fleet, policy, tasks)
    times = time_interleaved({"table": build}, seconds=seconds)
    yield Measurement("timetable of 10,000 devices x 16 mini-batches", times["table"], "s", 1.0)


def measure_schedules(size: int = 10_000, seconds: float = 2.0) -> Iterator[Measurement]:
    """Time the schedules of large rounds, with the costs of what methods draw."""
    fleet = Fleet(size=size, speed=ChangingTrace(per_round=4.0))
    distreal = Distreal(local=LocalTraining(batch=10))  # 16 mini-batches
    for name, make, limit in (
        ("digits CNN", make_digits_like, 2.0),
        ("DenseNet-40", make_densenet_like, 10.0),
    ):
        schedule = partial(schedule_round, _make_run(distreal, make, fleet), np.arange(size))
        times = time_interleaved({"round": schedule}, seconds=0)
        yield Measurement(
            f"DISTREAL's schedule of such a round, {name}", times["round"], "s", limit
        )
    run = _make_run(FedDropout(), make_digits_like, fleet)
    few, many = size // 40, size // 10
    schedules = {str(n): partial(schedule_round, run, np.arange(n)) for n in (few, many)}
    times = time_interleaved(schedules, seconds=seconds)
    ratio = times[str(many)] / many / (times[str(few)] / few)
    yield Measurement(f"  Federated Dropout per device, {many:,} / {few:,} devices", ratio, "", 1.1)


def _make_run(method: Method, make: MakeInputs, fleet: Fleet) -> Run:
    net, data = make()
    state = RunState(0, 0.0, ServerState(get_params(net)), {})
    return Run(build_context(net, data, method), fleet, RunSettings(), state)


def _time_rounds(
    runs: Mapping[str, Generator[RoundRecord, None, None]], seconds: float
) -> dict[str, float]:
    with ExitStack() as stack:
        steps = {kind: partial(next, stack.enter_context(closing(runs[kind]))) for kind in runs}
        return time_interleaved(steps, seconds=seconds)


def _time_first_round(workers: AnyWorkers) -> float:
    # The imports of this module are done: only start-up remains.
    start = time.perf_counter()
    with closing(run_rounds(NoTraining(), make_digits_like, workers=workers)) as records:
        next(records)
        return time.perf_counter() - start


def _measure_memory(size: int) -> float:
    for _ in run_rounds(NoTraining(), make_tiny, rounds=100, size=size):
        pass
    return float(psutil.Process().memory_info().rss)


def _measure_peak(devices: int, workers: AnyWorkers) -> float:
    method = FedAvg(LocalTraining(Sgd(lr=0.01), BATCH))
    records = run_rounds(method, make_large, per_round=devices, size=devices, workers=workers)
    with closing(records):
        next(records)
        process = psutil.Process()
        return float(sum(_read_peak(p.pid) for p in (process, *process.children(recursive=True))))


def _read_peak(pid: int) -> int:
    """Return the most kilobytes that a process has had in memory.

    `getrusage` would count the memory of the parent that the process was forked from, too.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def _measure_growth(rounds: int) -> float:
    sizes = {}
    method = FedAvg(LocalTraining(Sgd(lr=0.01), BATCH))
    make = partial(make_digits_like, 16)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "run")
        every = Evaluation(every=50)  # both rounds are evaluated, as the last one always is
        for record in run_rounds(
            method, make, rounds=rounds, size=10_000, folder=folder, evaluation=every
        ):
            if record.round + 1 in (50, rounds):
                gc.collect()
                sizes[record.round + 1] = psutil.Process().memory_info().rss
    return float(sizes[rounds] / sizes[50])
