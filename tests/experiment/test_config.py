import pytest

from pliant.cli.server import check_experiment
from pliant.compression import Int8
from pliant.devices import ChangingTrace, Fleet, RecordedTrace, get_device_classes
from pliant.engine.evaluation import Evaluation
from pliant.engine.round_loop import RunSettings
from pliant.engine.round_rules import RoundRules
from pliant.experiment.build import build_experiment
from pliant.experiment.config import (
    DataConfig,
    Experiment,
    NetworkConfig,
    load_experiment,
    load_run_config,
    start_run,
)
from pliant.methods import Distreal, FedAvg
from pliant.methods.privacy import DevicePrivacy
from pliant.methods.validation import ValidationPolicy
from pliant.params import digest, get_params
from pliant.table_search import StepTimeModel
from pliant.value import decode, encode
from pliant.workers.pool import InlineWorkers, ProcessWorkers

SPEC = """
rounds = 3
seed = 4

[method]
type = "distreal"
budget = "paced"
local = { batch = 16, optimiser = { type = "sgd", lr = 0.05 } }

[fleet]
size = 20
speed = { type = "changing", low = 0.25, per_round = 2 }

[rules]
late = "partial"
"""


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "digits.toml"
    path.write_text(SPEC)
    return path


def test_a_file_becomes_an_experiment(spec):
    experiment = load_experiment(spec)
    assert isinstance(experiment.method, Distreal)
    assert (experiment.method.budget, experiment.method.local.batch) == ("paced", 16)
    assert experiment.fleet == Fleet(size=20, speed=ChangingTrace(low=0.25, per_round=2.0))
    assert experiment.settings.rules == RoundRules(late="partial")
    assert (
        experiment.settings.rounds,
        experiment.settings.seed,
        experiment.settings.per_round,
    ) == (3, 4, 10)
    assert experiment.workers == ProcessWorkers()


def test_the_settings_have_every_field_of_the_same_name():
    changed = {
        "rounds": 7,
        "seconds": 9.0,
        "per_round": 3,
        "seed": 5,
        "select": "available",
        "rules": RoundRules(late="wait"),
        "evaluation": Evaluation(every=3),
        "checkpoint_every": 2,
        "guard": ValidationPolicy(norm=2.0),
        "compression": Int8(),
        "step_records": False,
        "privacy": DevicePrivacy(clip=1.0, noise=1.0),
        "ema_decay": 0.9,
        "step_time": StepTimeModel(start=1e-3, per_mac=1e-10, per_byte=0.0, batch=8),
    }
    assert set(changed) == set(RunSettings.__struct_fields__)
    experiment = Experiment(FedAvg(), Fleet(size=2), **changed)
    for name, value in changed.items():
        assert getattr(experiment.settings, name) == value != getattr(RunSettings(), name)


def test_the_command_line_overrides_the_file(spec):
    experiment = load_experiment(
        spec,
        [
            "rounds=5",
            "method.local.batch=8",
            "method.budget=as-written",  # a bare word
            'data.name="digits"',
            'workers={type="inline"}',
            "network.options.hidden=16",
            "network.options.filters=[6, 12]",
        ],
    )
    assert experiment.rounds == 5
    assert experiment.method.local.batch == 8
    assert experiment.method.budget == "as-written"
    assert experiment.workers == InlineWorkers()
    assert experiment.network.options == {"hidden": 16, "filters": (6, 12)}
    net, _ = build_experiment(experiment)
    assert net.features[0].out_channels == 6


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rounds", "Expected key=value, got 'rounds'"),
        ("=5", "Expected key=value, got '=5'"),
        ("rounds.deep=5", "Expected a table at 'rounds' of 'rounds.deep=5', found a value"),
        ("rounds=0", r"digits.toml: Expected `int` >= 1 at `rounds`, got 0"),
        ("rounds=many", r"digits.toml: Expected `int` at `rounds`, got 'many'"),
        ("rounnds=5", r"digits.toml: unknown key `rounnds`; did you mean 'rounds'?"),
        ("method.mu=5", r"digits.toml: unknown key `method.mu`; there are"),
        ("method.type=fedbest", r"digits.toml: unknown `method.type` = 'fedbest'"),
        ("workers.type=none", r"digits.toml: unknown `workers.type` = 'none'"),
    ],
)
def test_a_wrong_override_is_a_one_line_error(spec, override, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_experiment(spec, [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"rounds = = 3", r"digits.toml: Invalid value \(at line 1, column 10\)"),
        (b"\xff\xfe", "digits.toml: expected a TOML file in UTF-8"),
        (b"", "digits.toml: expected a key `method`, found none"),
        (b'[method]\ntype = "fedavg"\n', "digits.toml: expected a key `fleet`, found none"),
    ],
)
def test_a_wrong_file_is_a_one_line_error(spec, text, message):
    spec.write_bytes(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_experiment(spec)
    assert "\n" not in str(caught.value)


def make_experiment(**changes):
    return Experiment(FedAvg(), Fleet(size=20), **changes)


def test_an_experiment_builds_the_same_network_and_partition_again():
    net, data = build_experiment(make_experiment(seed=1))
    again, data_again = build_experiment(make_experiment(seed=1))
    assert digest(get_params(net)) == digest(get_params(again))
    assert all((a == b).all() for a, b in zip(data.shares, data_again.shares, strict=True))
    other, _ = build_experiment(make_experiment(seed=2))
    assert digest(get_params(net)) != digest(get_params(other))
    assert len(data) == 20


def test_the_network_fits_the_data():
    for name in ("digits_cnn", "femnist_cnn", "resnet20", "lenet"):
        net, data = build_experiment(make_experiment(network=NetworkConfig(name)))
        assert net(data.test.get_normalised(slice(0, 2))).shape == (2, 10)
    net, _ = build_experiment(make_experiment(network=NetworkConfig("digits_cnn", {"hidden": 7})))
    assert net.classifier[1].out_features == 7


def test_data_may_have_fewer_devices_than_the_fleet():
    _, data = build_experiment(make_experiment(data=DataConfig(devices=5, proxy=100)))
    assert (len(data), len(data.proxy)) == (5, 100)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"network": NetworkConfig("resnet2000")},
            "unknown network 'resnet2000'; did you mean 'resnet20'",
        ),
        ({"network": NetworkConfig("digits_cnn", {"hiden": 3})}, "network digits_cnn: .*'hiden'"),
        ({"data": DataConfig("mnits")}, "mnits"),
        ({"data": DataConfig(devices=100_000)}, "Expected at most"),
    ],
)
def test_an_experiment_that_cannot_be_built_is_a_one_line_error(changes, message):
    with pytest.raises((ValueError, LookupError), match=message):
        build_experiment(make_experiment(**changes))


def test_a_run_folder_stores_its_experiment(spec, tmp_path):
    experiment = load_experiment(spec, ["rules.dropout=0.1"])
    assert decode(encode(experiment), Experiment) == experiment
    start_run(tmp_path / "run", experiment)
    assert load_run_config(tmp_path / "run") == experiment
    with pytest.raises(FileExistsError, match="already holds a run"):
        start_run(tmp_path / "run", experiment)


def test_a_folder_without_a_valid_run_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a run folder"):
        load_run_config(tmp_path)
    (tmp_path / "config.json").write_text('{"rounds": 0}')
    with pytest.raises(ValueError, match=r"config\.json: "):
        load_run_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: "):
        load_run_config(tmp_path)


@pytest.mark.parametrize("data", ["digits", "mixed_noniid"])
def test_the_recordings_of_all_classes_are_read_before_the_run(tmp_path, data):
    path = tmp_path / "run.toml"
    classes = "{name = 'fast'}, {name = 'slow', share = 1e-9, speed = {type = 'product', parts = ["
    classes += "{type = 'constant'}, {type = 'recorded', path = 'none.csv'}]}}"
    spec = f"[method]\ntype = 'fedavg'\n[data]\nname = '{data}'\n[fleet]\nsize = 4\n"
    path.write_text(f"{spec}classes = [{classes}]\n")
    experiment = load_experiment(path)
    with pytest.raises(ValueError, match=r"none\.csv: expected a readable recording"):
        build_experiment(experiment)


def test_recordings_of_links_are_found_beside_the_file(tmp_path):
    (tmp_path / "up.csv").write_text("seconds,speed\n0,1000\n")
    path = tmp_path / "run.toml"
    link = "{ type = 'recorded', path = 'up.csv' }"
    path.write_text(
        f"[method]\ntype = 'fedavg'\n[fleet]\nsize = 4\nclasses = [{{ up = {link}, down = 5e3 }}]\n"
    )
    [device_class] = load_experiment(path).fleet.classes
    assert device_class.up == RecordedTrace(str(tmp_path / "up.csv"))
    assert device_class.down == 5000.0


def test_named_classes_are_stored_with_their_numbers(tmp_path):
    path = tmp_path / "run.toml"
    spec = "[method]\ntype = 'fedavg'\n[fleet]\nsize = 4\nclasses = "
    path.write_text(spec + "'flhetbench-2'\n")
    experiment = load_experiment(path)
    assert experiment.fleet.classes == get_device_classes("flhetbench-2")
    start_run(tmp_path / "run", experiment)
    assert load_run_config(tmp_path / "run") == experiment
    path.write_text(spec + "'flhetbench-5'\n")
    with pytest.raises(ValueError, match=r"unknown device classes .*at `fleet\.classes`"):
        load_experiment(path)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("seconds=5.0", "Expected no `seconds`"),
        ("evaluation.every_seconds=5.0", "Expected no `evaluation.every_seconds`"),
        ("data.grows={start=0.5}", "Expected no `data.grows`"),
    ],
)
def test_what_is_only_simulated_cannot_be_deployed(override, problem, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[method]\ntype = "fedavg"\n[fleet]\nsize = 10\n')
    with pytest.raises(ValueError, match=problem):
        check_experiment(load_experiment(path, [override]))


def test_data_may_grow_but_not_for_split_methods(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[method]\ntype = "fedavg"\n[fleet]\nsize = 10\n[rules]\nlate = "wait"\n')
    grows = "data.grows={start=0.5, rate=0.1}"
    _, data = build_experiment(load_experiment(path, [grows]))
    assert data.count_samples(3, 1.0) == int(0.6 * len(data.shares[3]))
    with pytest.raises(ValueError, match=r"Expected no `data.grows`"):
        build_experiment(
            load_experiment(path, [grows, "method.type=split", "method.cut=features.2"])
        )
