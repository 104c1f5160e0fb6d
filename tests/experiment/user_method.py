"""A user's method, with state on the server and on devices, and an experiment with it."""

from pliant.cli import main
from pliant.engine.ledger import RoundRecord
from pliant.engine.run_store import read_records

CODE = '''
from dataclasses import dataclass, field, replace

from torch import Tensor

import pliant as pl


@dataclass(frozen=True)
class State:
    params: dict[str, Tensor]
    velocity: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Memory:
    delta: dict[str, Tensor] = field(default_factory=dict)
    rounds: int = 0


class Remembering(pl.Value, frozen=True):
    """Both sides remember: the server a momentum, each device its last delta."""

    local: pl.LocalTraining = pl.LocalTraining()
    beta: float = 0.5

    def init_state(self, params):
        return State(params)

    def init_device_state(self, params):
        return Memory()

    def train(self, net, task, steps):
        update = pl.train_locally(net, task, steps, self.local.optimiser)
        last, scale = task.device_state, self.beta / (1 + task.device_state.rounds)
        delta = {n: d + scale * last.delta.get(n, 0.0) for n, d in update.delta.items()}
        return replace(update, delta=delta, device_state=Memory(delta, last.rounds + 1))

    def merge(self, net, state, updates):
        if not updates:
            return state
        delta = pl.average_deltas(net, state.params, updates, pl.weight_by("samples"))
        velocity = {n: d + self.beta * state.velocity.get(n, 0.0) for n, d in delta.items()}
        return State(pl.apply_delta(state.params, velocity), velocity)


@dataclass(frozen=True)
class NamedMemory:
    name: str = ""


class Forgetting(Remembering, frozen=True):
    def init_device_state(self, params):
        return NamedMemory()


class Plain(pl.Value, frozen=True):
    """A method that states nothing but how devices train, which is FedAvg."""

    local: pl.LocalTraining = pl.LocalTraining()


def not_a_method():
    return 3
'''
SPEC = """
rounds = 3
per_round = 2
checkpoint_every = 1

[method]
type = "{type}"
local = {{ batch = 16 }}

[fleet]
size = 2
round_seconds = 20.0

[network]
name = "digits_cnn"
options = {{ hidden = 16 }}

[data]
name = "digits"
proxy = 7800

[evaluation]
every = 3
statistics = {{ type = "running" }}

[workers]
type = "inline"
"""


def write_spec(folder):
    (folder / "mine.py").write_text(CODE)
    path = folder / "mine.toml"
    path.write_text(SPEC.format(type="mine.py:Remembering"))
    return path


def run(spec, folder, *overrides):
    assert main(["run", str(spec), *overrides, "--out", str(folder)]) == 0
    return read_digest(folder)


def read_digest(folder):
    *_, last = read_records(folder)
    assert isinstance(last, RoundRecord)
    assert last.digest is not None
    return last.digest
