import msgspec
import pytest

from pliant.devices import Changing, Fleet
from pliant.engine.rules import Rules
from pliant.engine.workers import Inline, Processes
from pliant.experiment import Data, Experiment, Network, begin, build, load_experiment, recall
from pliant.methods import Distreal, FedAvg
from pliant.params import digest, params_of
from pliant.value import decode, encode

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
    found = load_experiment(spec)
    assert isinstance(found.method, Distreal)
    assert (found.method.budget, found.method.local.batch) == ("paced", 16)
    assert found.fleet == Fleet(size=20, speed=Changing(low=0.25, per_round=2.0))
    assert found.setting.rules == Rules(late="partial")
    assert (found.setting.rounds, found.setting.seed, found.setting.per_round) == (3, 4, 10)
    assert found.workers == Processes()


def test_the_setting_has_every_field_of_the_same_name():
    experiment = Experiment(FedAvg(), Fleet(size=2), rounds=7, per_round=3, seed=5)
    names = [field.name for field in msgspec.structs.fields(experiment.setting)]
    for name in names:
        assert getattr(experiment.setting, name) == getattr(experiment, name)


def test_the_command_line_overrides_the_file(spec):
    found = load_experiment(
        spec,
        [
            "rounds=5",
            "method.local.batch=8",
            "method.budget=as-written",  # a bare word
            'data.name="digits"',
            'workers={type="inline"}',
            "network.options.hidden=16",
        ],
    )
    assert found.rounds == 5
    assert found.method.local.batch == 8
    assert found.method.budget == "as-written"
    assert found.workers == Inline()
    assert found.network.options == {"hidden": 16}


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
def test_a_wrong_override_is_told_in_one_line(spec, override, message):
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
def test_a_wrong_file_is_told_in_one_line(spec, text, message):
    spec.write_bytes(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_experiment(spec)
    assert "\n" not in str(caught.value)


def small(**changes):
    return Experiment(FedAvg(), Fleet(size=20), **changes)


def test_one_experiment_builds_one_network_and_one_partition():
    net, data = build(small(seed=1))
    again, data_again = build(small(seed=1))
    assert digest(params_of(net)) == digest(params_of(again))
    assert all((a == b).all() for a, b in zip(data.devices, data_again.devices, strict=True))
    other, _ = build(small(seed=2))
    assert digest(params_of(net)) != digest(params_of(other))
    assert len(data) == 20


def test_the_network_fits_the_data():
    for name in ("digits_cnn", "femnist_cnn", "resnet20", "lenet"):
        net, data = build(small(network=Network(name)))
        assert net(data.test.normalised(slice(0, 2))).shape == (2, 10)
    net, _ = build(small(network=Network("digits_cnn", {"hidden": 7})))
    assert net.classifier[1].out_features == 7


def test_data_may_have_fewer_devices_than_the_fleet():
    _, data = build(small(data=Data(devices=5, proxy=100)))
    assert (len(data), len(data.proxy)) == (5, 100)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"network": Network("resnet2000")},
            "unknown network 'resnet2000'; did you mean 'resnet20'",
        ),
        ({"network": Network("digits_cnn", {"hiden": 3})}, "network digits_cnn: .*'hiden'"),
        ({"data": Data("mnits")}, "mnits"),
        ({"data": Data(devices=100_000)}, "Expected at most"),
    ],
)
def test_what_cannot_be_built_is_told_in_one_line(changes, message):
    with pytest.raises((ValueError, LookupError), match=message):
        build(small(**changes))


def test_a_folder_remembers_its_experiment(spec, tmp_path):
    experiment = load_experiment(spec, ["rules.dropout=0.1"])
    assert decode(encode(experiment), Experiment) == experiment
    begin(tmp_path / "run", experiment)
    assert recall(tmp_path / "run") == experiment
    with pytest.raises(FileExistsError, match="holds a run already"):
        begin(tmp_path / "run", experiment)


def test_a_folder_without_a_run_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected the folder of a run"):
        recall(tmp_path)
    (tmp_path / "config.json").write_text('{"rounds": 0}')
    with pytest.raises(ValueError, match=r"config\.json: "):
        recall(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: "):
        recall(tmp_path)
