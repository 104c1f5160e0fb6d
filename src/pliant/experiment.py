"""One TOML file = one run: load it, override it, check it, build what it describes."""

import inspect
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from pliant import record, rng
from pliant.data import AnyPartition, Federated, Iid, Images, Source, load
from pliant.data.mixture import MIXTURES, federated
from pliant.devices import Fleet
from pliant.engine.evaluate import Evaluation
from pliant.engine.ledger import RoundRecord
from pliant.engine.rules import Rules
from pliant.engine.select import Selection
from pliant.engine.simulate import Setting, simulate
from pliant.engine.split import simulate_split
from pliant.engine.workers import AnyWorkers, Processes
from pliant.explore import Exploration, load_profile, load_table
from pliant.hints import nearest
from pliant.methods import AnyMethod
from pliant.methods.guard import Policy
from pliant.nn.models import MODELS
from pliant.own import anchored, is_own, own_function
from pliant.split import AnySplit
from pliant.value import Count, Positive, Value, decode, encode


class Network(Value, frozen=True):
    """A network by its name, bundled or `file.py:function`, with the options that it takes."""

    name: str = "digits_cnn"
    options: dict[str, int | float] = msgspec.field(default_factory=dict)


class Data(Value, frozen=True):
    """A data set by its name, known or `file.py:function`, and how devices share it."""

    name: str = "digits"
    root: str | None = None
    partition: AnyPartition = Iid()
    devices: Count | None = None  # None: as many as the fleet has
    proxy: int | float | None = None
    proxy_seed: int | None = None  # of which images are the proxy's; None: the run's
    samples: Count | None = None  # of each client of a mixture, at most; None: all
    tests: Count | None = None


class Experiment(Value, frozen=True):
    """Everything about a run."""

    method: AnyMethod | AnySplit
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
    server_speed: Positive | None = None  # MAC/s, for split methods; None: no time is charged
    search: Exploration | None = None  # what `pliant search` does with the same file

    @property
    def federated(self) -> AnyMethod:
        """Return the method where only a federated one will do."""
        if isinstance(self.method, AnySplit):
            kind = type(self.method).__name__
            raise ValueError(f"Expected a federated method, got {kind}, which splits the network")
        return self.method

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


class SearchRun(Value, frozen=True):
    """Everything about a search; its file may say more, about runs that use the table."""

    search: Exploration = Exploration()
    network: Network = Network()
    data: Data = Data()
    seed: int = 0  # of weights, and of the proxy unless `data.proxy_seed` says otherwise
    workers: AnyWorkers = Processes()


def load_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read a TOML file and what the command line says otherwise."""
    raw = overridden(path, overrides)
    try:
        return decode(resolved(raw, path.parent), Experiment)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def load_search(path: Path, overrides: Sequence[str] = ()) -> SearchRun:
    """Read the part of a TOML file that is about a search."""
    raw = overridden(path, overrides)
    others = {field.name for field in msgspec.structs.fields(Experiment)} | {"matrix"}
    known = {field.name for field in msgspec.structs.fields(SearchRun)}
    try:
        kept = {key: raw[key] for key in raw if key not in others - known}
        return decode(resolved(kept, path.parent), SearchRun)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def resolved(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make plain data independent of where it was read.

    A method's table and a search's profile come in the place of the paths to them; the user's own
    functions and recordings get the whole path of their file.
    """
    made = dict(raw)
    if "fleet" in raw:
        made["fleet"] = _with_recordings(raw["fleet"], folder)
    for key in ("network", "data"):
        table = raw.get(key)
        name = table.get("name") if isinstance(table, dict) else None
        if isinstance(table, dict) and isinstance(name, str) and is_own(name):
            made[key] = table | {"name": anchored(name, folder)}
    method = raw.get("method")
    if isinstance(method, dict) and isinstance(method.get("table"), str):
        made["method"] = method | {"table": encode(load_table(folder / method["table"]))}
    search = raw.get("search")
    if isinstance(search, dict) and isinstance(search.get("profile"), str):
        made["search"] = search | {"profile": encode(load_profile(folder / search["profile"]))}
    return made


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


def _with_recordings(part: Any, folder: Path) -> Any:
    """Return a fleet's plain data with the whole paths of the recordings that it plays."""
    if isinstance(part, list):
        return [_with_recordings(item, folder) for item in part]
    if not isinstance(part, dict):
        return part
    made = {key: _with_recordings(value, folder) for key, value in part.items()}
    path = made.get("path")
    if part.get("type") in ("recorded", "availability") and isinstance(path, str) and path:
        made["path"] = str((folder / path).resolve())
    return made


def build(experiment: Experiment) -> tuple[nn.Module, Federated]:
    """Make the network and the data; the same experiment gives the same ones."""
    spec = experiment.data
    if spec.name in MIXTURES:
        data = _mixed(spec, experiment.seed)
        return weights(experiment.network, data, experiment.seed), data
    experiment.fleet.device(0).work(0.0, 1.0)  # a recording that cannot be read is told now
    devices = spec.devices or experiment.fleet.size
    data = _shared(spec, spec.partition, devices, experiment.seed)
    return weights(experiment.network, data, experiment.seed), data


@lru_cache(maxsize=2)  # a comparison asks for the same images again and again
def _mixed(spec: Data, seed: int) -> Federated:
    mixture = MIXTURES[spec.name](Path(spec.root) if spec.root else None, seed)
    return federated(mixture, samples=spec.samples, tests=spec.tests, seed=seed)


def records(
    experiment: Experiment,
    net: nn.Module,
    data: Federated,
    *,
    workers: AnyWorkers,
    folder: Path,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Iterator[RoundRecord]:
    """Run an experiment, whichever engine its method asks for, and yield its rounds."""
    if isinstance(experiment.method, AnySplit):
        return simulate_split(
            experiment.method,
            net,
            data,
            experiment.fleet,
            setting=experiment.setting,
            server_speed=experiment.server_speed,
            folder=folder,
            is_stopped=is_stopped,
        )
    return simulate(
        experiment.method,
        net,
        data,
        experiment.fleet,
        setting=experiment.setting,
        workers=workers,
        folder=folder,
        source=partial(build, experiment),
        is_stopped=is_stopped,
    )


def build_search(run: SearchRun) -> tuple[nn.Module, Images]:
    """Make the network and the proxy images: those that a run with the same seed holds back."""
    data = _shared(run.data, Iid(), 1, run.seed)
    return weights(run.network, data, run.seed), data.proxy


def _shared(spec: Data, partition: AnyPartition, devices: int, seed: int) -> Federated:
    source = _source(spec)
    return source.share(partition, devices, seed, proxy=spec.proxy, proxy_seed=spec.proxy_seed)


def _source(spec: Data) -> Source:
    if not is_own(spec.name):
        return load(spec.name, Path(spec.root) if spec.root else None)
    found = own_function(spec.name)()
    if not isinstance(found, Source):
        raise ValueError(f"{spec.name}: expected a pliant.data.Source, got {type(found).__name__}")
    return found


def weights(network: Network, data: Federated, seed: int) -> nn.Module:
    """Make a network for these images; the same seed gives the same weights."""
    name = network.name
    if not is_own(name) and name not in MODELS:
        raise ValueError(f"unknown network {name!r}{nearest(name, MODELS)}")
    make = own_function(name) if is_own(name) else MODELS[name]
    channels, height, _ = data.train.shape
    known = {"classes": data.train.classes, "channels": channels, "side": height}
    taken = inspect.signature(make).parameters
    options = {key: known[key] for key in known if key in taken} | network.options
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.number(seed, "weights"))
        try:
            inspect.signature(make).bind(**options)
        except TypeError as error:
            raise ValueError(f"network {name}: {error}") from None
        made = make(**options)
    if not isinstance(made, nn.Module):
        raise ValueError(f"network {name}: expected an nn.Module, got {type(made).__name__}")
    return made


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
