"""One TOML file = one run: load it, override it, check it, build what it describes."""

import inspect
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from pliant import record, rng
from pliant.data import AnyPartition, Federated, Iid, load
from pliant.devices import Fleet
from pliant.engine.evaluate import Evaluation
from pliant.engine.rules import Rules
from pliant.engine.select import Selection
from pliant.engine.simulate import Setting
from pliant.engine.workers import AnyWorkers, Processes
from pliant.methods import AnyMethod
from pliant.methods.guard import Policy
from pliant.nn.models import MODELS
from pliant.value import Count, Value, decode, encode


class Network(Value, frozen=True):
    """A bundled network by its name, with the options that it takes."""

    name: str = "digits_cnn"
    options: dict[str, int | float] = msgspec.field(default_factory=dict)


class Data(Value, frozen=True):
    """A data set by its name, and how it is shared among devices."""

    name: str = "digits"
    root: str | None = None
    partition: AnyPartition = Iid()
    devices: Count | None = None  # None: as many as the fleet has
    proxy: int | float | None = None


class Experiment(Value, frozen=True):
    """Everything about a run."""

    method: AnyMethod
    fleet: Fleet
    network: Network = Network()
    data: Data = Data()
    rounds: Count = 100
    per_round: Count = 10
    seed: int = 0
    select: Selection = "uniform"
    rules: Rules = Rules()
    evaluation: Evaluation = Evaluation()
    checkpoint_every: Count = 10
    guard: Policy = Policy()
    workers: AnyWorkers = Processes()

    @property
    def setting(self) -> Setting:
        """Return how rounds are run."""
        return Setting(
            self.rounds,
            self.per_round,
            self.seed,
            self.select,
            self.rules,
            self.evaluation,
            self.checkpoint_every,
            self.guard,
        )


def load_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read a TOML file and what the command line says otherwise."""
    raw = overridden(path, overrides)
    try:
        return decode(raw, Experiment)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def overridden(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a TOML file as plain data, with the key=value of the command line in it."""
    try:
        raw = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: expected a TOML file in UTF-8") from None
    for override in overrides:
        _override(raw, override)
    return raw


def _override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"Expected key=value, got {override!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    *path, last = key.strip().split(".")
    table = raw
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ValueError(f"Expected a table at {part!r} of {override!r}, found a value")
    table[last] = value


def build(experiment: Experiment) -> tuple[nn.Module, Federated]:
    """Make the network and the data; the same experiment gives the same ones."""
    spec = experiment.data
    source = load(spec.name, Path(spec.root) if spec.root else None)
    devices = spec.devices or experiment.fleet.size
    data = source.share(spec.partition, devices, experiment.seed, proxy=spec.proxy)
    return weights(experiment.network, data, experiment.seed), data


def weights(network: Network, data: Federated, seed: int) -> nn.Module:
    """Make a network for these images; the same seed gives the same weights."""
    name = network.name
    if name not in MODELS:
        raise ValueError(f"Expected a network of {', '.join(sorted(MODELS))}, got {name!r}")
    channels, height, _ = data.train.shape
    known = {"classes": data.train.classes, "channels": channels, "side": height}
    taken = inspect.signature(MODELS[name]).parameters
    options = {key: known[key] for key in known if key in taken} | network.options
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.number(seed, "weights"))
        try:
            return MODELS[name](**options)
        except TypeError as error:
            raise ValueError(f"network {name}: {error}") from None


def begin(folder: Path, experiment: Experiment) -> None:
    """Write what was asked for, resolved, before the first step."""
    record.begin(folder, encode(experiment))


def recall(folder: Path) -> Experiment:
    """Read what a run was asked for."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: expected the folder of a run, found no config.json")
    try:
        return decode(msgspec.json.decode(path.read_bytes()), Experiment)
    except (ValueError, msgspec.DecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
