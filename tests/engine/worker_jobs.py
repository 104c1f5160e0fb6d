"""Functions that the tests of workers send to other processes."""

import os
import signal
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from pliant.params import digest, params_of
from pliant.rng import stream


@dataclass(frozen=True)
class Train:
    device: int
    steps: int = 2
    flag: str = ""  # a file; where it is missing, the job makes it and kills its process


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def network():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 64), nn.Linear(64, 10)
    )


def initial():
    params = params_of(network())
    params["0.weight"] = params["0.weight"].contiguous(memory_format=torch.channels_last)
    return params


def world():
    return network()


def train(net, shared, job):
    """A few real steps, by address, whose bits would show a difference in threads or strides."""
    if job.flag and not Path(job.flag).exists():
        Path(job.flag).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    net.load_state_dict(shared)
    for step in range(job.steps):
        draws = stream(1, "worker test", job.device, step)
        images = torch.from_numpy(draws.standard_normal((16, 3, 8, 8), "float32"))
        classes = torch.from_numpy(draws.integers(0, 10, 16))
        loss = functional.cross_entropy(net(images), classes)
        weights = list(net.parameters())
        slopes = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, slope in zip(weights, slopes, strict=True):
                weight.sub_(slope, alpha=0.1)
    return {"device": job.device, "params": params_of(net)}


def rounds(pool, jobs, count=2):
    """Run a few rounds in which the parameters change, and return the hash of everything."""
    shared, found = initial(), []
    for _ in range(count):
        results = pool.run(jobs, shared, cost=lambda job: job.steps)
        assert [result["device"] for result in results] == [job.device for job in jobs]
        found += [digest(result["params"]) for result in results]
        shared = results[-1]["params"]
    return sha256(" ".join(found).encode()).hexdigest()


def nothing():
    return None


def broken():
    raise LookupError("no data here")


def act(_, shared, job):
    """Do what the job's first word says."""
    verb, *rest = job
    match verb:
        case "echo":
            return rest[0]
        case "read":
            return {name: tensor.clone() for name, tensor in shared.items()}
        case "spoil":
            for tensor in shared.values():
                tensor.detach().numpy()[...] = -1
            return None
        case "raise":
            raise ValueError("no such device: 7")
        case "raise oddly":
            raise Unpicklable(1, 2)
        case "unpicklable":
            return lambda: None
        case "exit":
            os._exit(rest[0])
        case "sleep":
            Path(rest[0]).write_text(str(os.getpid()))
            time.sleep(rest[1])
        case "facts":
            kept = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            threads = os.environ.get("OMP_NUM_THREADS"), os.environ.get("MKL_NUM_THREADS")
            return torch.get_num_threads(), threads, kept, os.getpid()
    return None
