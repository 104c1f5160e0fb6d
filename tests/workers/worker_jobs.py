"""Functions that the worker tests send to other processes."""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.nn import functional

from pliant.params import digest, get_params
from pliant.rng import rng_stream


@dataclass(frozen=True)
class Train:
    device: int
    steps: int = 2
    flag: str = ""  # a file; if missing, the job creates it and kills its process


class Unpicklable(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def network():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 64), nn.Linear(64, 10)
    )


def initial_params():
    params = get_params(network())
    params["0.weight"] = params["0.weight"].contiguous(memory_format=torch.channels_last)
    return params


def build_context():
    return network()


def train(net, shared, job):
    """Train a few real steps whose bits would reveal a difference in threads or strides."""
    if job.flag and not Path(job.flag).exists():
        Path(job.flag).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    net.load_state_dict(shared)
    for step in range(job.steps):
        rng = rng_stream(1, "worker test", job.device, step)
        images = torch.from_numpy(rng.standard_normal((16, 3, 8, 8), "float32"))
        classes = torch.from_numpy(rng.integers(0, 10, 16))
        loss = functional.cross_entropy(net(images), classes)
        weights = list(net.parameters())
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.sub_(gradient, alpha=0.1)
    return {"device": job.device, "params": get_params(net)}


def run_rounds(pool, jobs, count=2):
    """Run a few rounds in which the parameters change, and return the hash of all results."""
    shared, digests = initial_params(), []
    for _ in range(count):
        results = pool.run(jobs, shared, cost=lambda job: job.steps)
        assert [result["device"] for result in results] == [job.device for job in jobs]
        digests += [digest(result["params"]) for result in results]
        shared = results[-1]["params"]
    return sha256(" ".join(digests).encode()).hexdigest()


def list_workers():
    """Return this process's workers: forked from it or one of its children, or spawned."""
    workers, own_command = [], " ".join(psutil.Process().cmdline())
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            command = " ".join(process.cmdline())
            is_forked = "forkserver" in command and process.ppid() != os.getpid()
            if is_forked or "spawn_main" in command or command == own_command:
                workers.append(process)
    return workers


def no_context():
    return None


def failing_context():
    raise LookupError("no data here")


def execute(_, shared, job):
    """Execute the command that the job starts with."""
    command, *arguments = job
    match command:
        case "echo":
            return arguments[0]
        case "read":
            return {name: tensor.clone() for name, tensor in shared.items()}
        case "overwrite":
            for tensor in shared.values():
                tensor.detach().numpy()[...] = -1
            return None
        case "raise":
            raise ValueError("no such device: 7")
        case "raise unpicklable":
            raise Unpicklable(1, 2)
        case "return unpicklable":
            return lambda: None
        case "exit":
            os._exit(arguments[0])
        case "sleep":
            Path(arguments[0]).write_text(str(os.getpid()))
            time.sleep(arguments[1])
        case "environment":
            return os.environ.get(arguments[0])
        case "facts":
            ignores_sigint = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            threads = os.environ.get("OMP_NUM_THREADS"), os.environ.get("MKL_NUM_THREADS")
            return torch.get_num_threads(), threads, ignores_sigint, os.getpid()
    return None
