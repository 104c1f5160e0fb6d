"""Read experiment and search files: TOML with key=value overrides."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from pliant.compression import AnyCompression, Uncompressed
from pliant.data import AnyPartition, DataGrowth, Iid
from pliant.data.own_images import ImageForm
from pliant.devices import Fleet, get_device_classes
from pliant.engine.evaluation import Evaluation
from pliant.engine.round_loop import RunSettings
from pliant.engine.round_rules import RoundRules
from pliant.engine.selection import Selection
from pliant.experiment.user_code import hash_code, is_user_function, load_method, make_absolute
from pliant.methods import AnyMethod, Method
from pliant.methods.privacy import DevicePrivacy
from pliant.methods.validation import ValidationPolicy
from pliant.nn.optimisers import MomentumFactor
from pliant.nn.sites import ElasticOptions
from pliant.nn.table_file import load_table
from pliant.split import AnySplit
from pliant.storage import run_dir
from pliant.table_search import SearchSettings, StepTimeModel, load_step_time_model
from pliant.value import (
    Count,
    Numbers,
    Positive,
    Rounds,
    Value,
    decode,
    describe_difference,
    encode,
)
from pliant.workers.pool import AnyWorkers, ProcessWorkers


class NetworkConfig(Value, frozen=True):
    """A bundled network or `file.py:function`, and its options."""

    name: str = "digits_cnn"
    options: dict[str, Numbers] = msgspec.field(default_factory=dict)
    hidden: bool = False  # narrow hidden linear layers too
    coupled: bool = True  # layers whose outputs are added or multiplied share one mask
    # of devices that bring their own data, where no data set tells them
    input: tuple[Count, Count, Count] | None = None  # channels, height and width of an image
    classes: Count | tuple[str, ...] | None = None  # their number or names
    mean: tuple[float, ...] = ()  # per channel, of bytes / 255 or of floats as they are; empty: 0
    std: tuple[Positive, ...] = ()  # likewise; empty: 1

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if (self.input is None) != (self.classes is None):
            found = "input" if self.classes is None else "classes"
            raise ValueError(f"Expected both `input` and `classes` or neither, got only `{found}`")
        if self.input is not None and not {len(self.mean), len(self.std)} <= {0, self.input[0]}:
            raise ValueError(
                f"Expected {self.input[0]} values of `mean` and `std`, one per channel"
            )

    @property
    def image_form(self) -> ImageForm:
        """Return what images of devices' own must be like; raise if it is not known."""
        if self.input is None or self.classes is None:
            raise ValueError("Expected `input` and `classes` in [network], found neither")
        names = self.classes
        if isinstance(names, int):
            names = tuple(map(str, range(names)))
        channels = self.input[0]
        mean, std = self.mean or (0.0,) * channels, self.std or (1.0,) * channels
        return ImageForm(self.input, names, mean, std)

    @property
    def elastic_options(self) -> ElasticOptions:
        return ElasticOptions(self.coupled, self.hidden)


class DataConfig(Value, frozen=True):
    """A known data set or `file.py:function`, and how devices share it."""

    name: str = "digits"
    root: str | None = None
    partition: AnyPartition = Iid()
    devices: Count | None = None  # None: the fleet's size
    proxy: int | float | None = None
    proxy_seed: int | None = None  # chooses the proxy images; None: the run's seed
    samples: Count | None = None  # maximum for each client of a mixture; None: all
    tests: Count | None = None  # likewise
    device_tests: Annotated[float, Meta(gt=0.0, lt=1.0)] | None = None  # share of a device's images
    grows: DataGrowth | None = None  # None: devices have all their images from the start


class ServerConfig(Value, frozen=True):
    """What a server has and allows if devices bring their own data."""

    proxy: str | None = None  # images, as a folder or `file.py:function`
    holdout: str | None = None  # likewise, to evaluate the network on
    max_samples: Count = 1_000_000  # that a device may declare


class UserMethod(Value, frozen=True, tag="user"):
    """A federated method of the user's own; TOML says `type = "file.py:Class"`."""

    code: str
    sha256: str | None = None  # of the file, when the run started
    options: dict[str, Any] = msgspec.field(default_factory=dict)

    def load(self) -> Method:
        """Import the class and make the method."""
        if self.sha256 != hash_code(self.code):
            raise ValueError(f"{self.code}: expected the file unchanged since the run started")
        method: Method = load_method(self.code, self.options)
        return method


class Experiment(Value, frozen=True):
    """The complete description of a run."""

    method: AnyMethod | UserMethod | AnySplit
    fleet: Fleet
    network: NetworkConfig = NetworkConfig()
    data: DataConfig = DataConfig()
    rounds: Rounds = 100
    seconds: Positive | None = None
    per_round: Count = 10
    seed: int = 0
    select: Selection = "uniform"
    rules: RoundRules = RoundRules()
    evaluation: Evaluation = Evaluation()
    checkpoint_every: Count = 10
    guard: ValidationPolicy = ValidationPolicy()
    compression: AnyCompression = Uncompressed()
    step_records: bool = True
    privacy: DevicePrivacy | None = None
    ema_decay: MomentumFactor = 0.0
    step_time: StepTimeModel | None = None  # or a profile: virtual time follows it, not MACs
    workers: AnyWorkers = ProcessWorkers()
    server_speed: Positive | None = None  # MAC/s, for split methods; None: the server takes no time
    search: SearchSettings | None = None  # settings of `pliant search` in the same file
    server: ServerConfig = ServerConfig()

    @property
    def federated_method(self) -> Method:
        """Return the method; raise if it is a split method."""
        if isinstance(self.method, AnySplit):
            kind = type(self.method).__name__
            raise ValueError(f"Expected a federated method, got {kind}, which splits the network")
        return self.method.load() if isinstance(self.method, UserMethod) else self.method

    @property
    def split_method(self) -> AnySplit:
        """Return the method; raise if it does not split the network."""
        if not isinstance(self.method, AnySplit):
            raise ValueError(f"Expected a split method, got {type(self.method).__name__}")
        return self.method

    @property
    def settings(self) -> RunSettings:
        names = RunSettings.__struct_fields__  # the same in both
        return RunSettings(**{name: getattr(self, name) for name in names})


class SearchRun(Value, frozen=True):
    """The complete description of a search; its file may also describe runs that use the table."""

    search: SearchSettings = SearchSettings()
    network: NetworkConfig = NetworkConfig()
    data: DataConfig = DataConfig()
    seed: int = 0  # of the weights, and of the proxy images unless `data.proxy_seed` is set
    server: ServerConfig = ServerConfig()
    workers: AnyWorkers = ProcessWorkers()


def load_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    raw = read_toml(path, overrides)
    if "matrix" in raw:
        raise ValueError(
            f"{path}: expected one run, got a [matrix] of them: use `pliant compare {path}`"
        )
    try:
        return decode_experiment(raw, path.parent)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def decode_experiment(raw: dict[str, Any], folder: Path) -> Experiment:
    """Convert plain data of a file in this folder to an experiment."""
    experiment = decode(resolve_paths(raw, folder), Experiment)
    size = experiment.fleet.size
    if "per_round" in raw and experiment.per_round > size:  # the default may be larger
        raise ValueError(
            f"Expected `per_round` of at most {size}, the devices of the fleet, "
            f"got {experiment.per_round}"
        )
    return experiment


def load_search(path: Path, overrides: Sequence[str] = ()) -> SearchRun:
    """Read the part of a TOML file that describes a search."""
    raw = read_toml(path, overrides)
    others = {*Experiment.__struct_fields__, "matrix"} - {*SearchRun.__struct_fields__}
    if "search" not in raw:
        raise ValueError(
            f"{path}: expected a table [search], found none; an empty one has the default settings"
        )
    search_keys = {key: raw[key] for key in raw if key not in others}
    try:
        return decode(resolve_paths(search_keys, path.parent), SearchRun)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def resolve_paths(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make plain data independent of the folder it was read from.

    Paths to a method's table and to a profile of step times are replaced by the contents of the
    files, and a name of device classes by these; paths to user code and recordings become absolute.
    """
    resolved = dict(raw)
    if "fleet" in raw:
        resolved["fleet"] = _resolve_recordings(_resolve_classes(raw["fleet"]), folder)
    for key in ("network", "data"):
        table = raw.get(key)
        name = table.get("name") if isinstance(table, dict) else None
        if isinstance(table, dict) and isinstance(name, str) and is_user_function(name):
            resolved[key] = table | {"name": make_absolute(name, folder)}
    if isinstance(raw.get("server"), dict):
        resolved["server"] = {
            key: _make_absolute_source(value, folder) if key in ("proxy", "holdout") else value
            for key, value in raw["server"].items()
        }
    if isinstance(raw.get("method"), dict):
        resolved["method"] = _resolve_method(raw["method"], folder)
    if isinstance(raw.get("step_time"), str):
        resolved["step_time"] = encode(load_step_time_model(folder / raw["step_time"]))
    search = raw.get("search")
    if isinstance(search, dict) and isinstance(search.get("profile"), str):
        profile = load_step_time_model(folder / search["profile"])
        resolved["search"] = search | {"profile": encode(profile)}
    return resolved


def _make_absolute_source(source: Any, folder: Path) -> Any:
    """Return a folder or `file.py:function` with an absolute path."""
    if not isinstance(source, str):
        return source
    if is_user_function(source):
        return make_absolute(source, folder)
    return str((folder / source).resolve())


def _resolve_method(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Load the table of a method, and describe a user's class by its file."""
    method = dict(raw)
    if isinstance(method.get("table"), str):
        method["table"] = encode(load_table(folder / method["table"]))
    if isinstance(method.get("inner"), dict) and method.get("type") == "fedbuff":
        method["inner"] = _resolve_method(method["inner"], folder)
    code = method.get("type")
    if not isinstance(code, str) or not is_user_function(code):
        return method
    del method["type"]
    code = make_absolute(code, folder)
    try:
        digest = hash_code(code)
    except FileNotFoundError:
        raise ValueError(f"{code}: expected a Python file, found none") from None
    return {"type": "user", "code": code, "sha256": digest, "options": method}


def read_toml(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a TOML file as plain data and apply key=value overrides."""
    try:
        raw = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        problem = str(error).replace("Cannot overwrite a value", "expected every key once")
        raise ValueError(f"{path}: {problem}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: expected a TOML file in UTF-8") from None
    for override in overrides:
        _apply_override(raw, override)
    return raw


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
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


def _resolve_classes(fleet: Any) -> Any:
    """Replace a name of device classes by these, so that the run's config has their numbers."""
    if not isinstance(fleet, dict) or not isinstance(fleet.get("classes"), str):
        return fleet
    try:
        return fleet | {"classes": encode(get_device_classes(fleet["classes"]))}
    except LookupError as error:
        raise ValueError(f"{error.args[0]} at `fleet.classes`") from None


def _resolve_recordings(raw: Any, folder: Path) -> Any:
    if isinstance(raw, list):
        return [_resolve_recordings(item, folder) for item in raw]
    if not isinstance(raw, dict):
        return raw
    resolved = {key: _resolve_recordings(value, folder) for key, value in raw.items()}
    path = resolved.get("path")
    if raw.get("type") in ("recorded", "availability") and isinstance(path, str) and path:
        resolved["path"] = str((folder / path).resolve())
    return resolved


def start_run(folder: Path, experiment: Experiment) -> None:
    """Create the folder of a run and write its resolved config."""
    run_dir.create_run_dir(folder, encode(experiment))


def load_run_config(folder: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read the experiment of a run; only its rounds and workers can be overridden."""
    config = run_dir.read_config(folder)
    try:
        experiment = decode(config, Experiment)
        for override in overrides:
            _apply_override(config, override)
        changed = decode(config, Experiment)
    except ValueError as error:
        raise ValueError(f"{folder / run_dir.CONFIG_FILE}: {error}") from None
    fixed = replace(experiment, rounds=changed.rounds, workers=changed.workers)
    if difference := describe_difference(encode(fixed), encode(changed)):
        raise ValueError(f"{folder} holds a run with {difference}: only rounds can be changed")
    return changed
