"""Over thirty wrong experiment files: each gives one line, exit code 2 and no files."""

import pytest

from pliant.cli import main

GOOD = """
rounds = 1
per_round = 2
[method]
type = "fedavg"
[fleet]
size = 4
"""

# the text of a wrong file, and part of its error message
WRONG = {
    "not TOML": ("rounds = = 3", "Invalid value (at line 1"),
    "an open string": ('name = "x', "(at "),
    "a key twice": ("rounds = 1\nrounds = 2", "expected every key once (at "),
    "a table twice": (GOOD + "[fleet]\nsize = 3", "fleet"),
    "nothing": ("", "expected a key `method`, found none"),
    "no fleet": ('[method]\ntype = "fedavg"', "expected a key `fleet`, found none"),
    "no size": ('[method]\ntype = "fedavg"\n[fleet]', "expected a key `fleet.size`, found none"),
    "no type": ("[method]\n[fleet]\nsize = 3", "expected a key `method.type`, found none"),
    "a method as text": ('method = "fedavg"\n[fleet]\nsize = 3', "Expected a table at `method`"),
    "a typo in a key": (
        GOOD.replace("rounds", "ruonds"),
        "unknown key `ruonds`; did you mean 'rounds'?",
    ),
    "a typo in a method": (
        GOOD.replace("fedavg", "distrael"),
        "unknown `method.type` = 'distrael'; did you mean 'distreal'?",
    ),
    "a key of another method": (
        GOOD.replace('"fedavg"', '"fedavg"\nmu = 0.1'),
        "unknown key `method.mu`; there are",
    ),
    "a typo in a word": (
        GOOD + '[rules]\nlate = "partail"',
        "unknown `rules.late` = 'partail'; did you mean 'partial'?",
    ),
    "a typo deep inside": (
        GOOD + '[method.local.optimiser]\ntype = "sgd"\nmomentun = 0.9',
        "unknown key `method.local.optimiser.momentun`; did you mean 'momentum'?",
    ),
    "zero rounds": (GOOD.replace("rounds = 1", "rounds = 0"), "Expected `int` >= 1 at `rounds`"),
    "endless rounds": (
        GOOD.replace("rounds = 1", f"rounds = {10**23}"),
        "Expected `int` <= 1000000000 at `rounds`",
    ),
    "a negative number": (
        GOOD.replace("per_round = 2", "per_round = -2"),
        "at `per_round`, got -2",
    ),
    "a fraction of a round": (GOOD.replace("rounds = 1", "rounds = 1.5"), "at `rounds`, got 1.5"),
    "a number as text": (GOOD.replace("rounds = 1", 'rounds = "1"'), "at `rounds`, got '1'"),
    "a list as number": (GOOD.replace("size = 4", "size = [4]"), "at `fleet.size`, got [4]"),
    "a negative rate": (
        GOOD + '[method.local]\noptimiser = { type = "sgd", lr = -0.1 }',
        "at `method.local.optimiser.lr`, got -0.1",
    ),
    "not a number": (
        GOOD + '[method.local]\noptimiser = { type = "sgd", lr = nan }',
        "at `method.local.optimiser.lr`, got nan",
    ),
    "an infinite number": (
        GOOD + '[fleet.speed]\ntype = "constant"\nhigh = inf',
        "in `fleet.speed`",
    ),
    "a share above one": (GOOD + "[rules]\nquorum = 1.5", "at `rules.quorum`, got 1.5"),
    "low above high": (
        GOOD + '[fleet.speed]\ntype = "changing"\nlow = 2.0\nhigh = 1.0',
        "fleet.speed",
    ),
    "a buffer above the tasks in flight": (
        GOOD.replace('"fedavg"', '"fedbuff"\nbuffer = 3'),
        "Expected a buffer of 1 to 2 updates, the number of tasks in flight, got 3",
    ),
    "more tasks than devices": (
        GOOD.replace('"fedavg"', '"fedasync"\nconcurrency = 5'),
        "Expected a concurrency of 1 to 4 tasks, one per device of the fleet, got 5",
    ),
    "a mixing weight of zero": (
        GOOD.replace('"fedavg"', '"fedasync"\nalpha = 0.0'),
        "at `method.alpha`, got 0.0",
    ),
    "a mixing weight above one": (
        GOOD.replace('"fedavg"', '"fedasync"\nalpha = 1.1'),
        "at `method.alpha`, got 1.1",
    ),
    "tasks of a length without a deadline": (
        GOOD.replace('"fedavg"', '"fedasync"\nwork = "seconds"') + '[rules]\nlate = "wait"',
        'Expected rules.late = "partial" or "discard", a deadline for each task',
    ),
    "a typo in an inner method": (
        GOOD.replace('"fedavg"', '"fedbuff"\ninner = { type = "distrael" }'),
        "unknown `method.inner.type` = 'distrael'; did you mean 'distreal'?",
    ),
    "an unknown network": (
        GOOD + '[network]\nname = "resnet21"',
        "unknown network 'resnet21'; did you mean 'resnet20'?",
    ),
    "an unknown option": (GOOD + "[network.options]\nwidht = 3", "network digits_cnn: "),
    "an unknown data set": (GOOD + '[data]\nname = "cifar11"', "cifar11"),
    "missing data": (
        GOOD + '[data]\nname = "cifar10"\nroot = "nowhere"',
        "nowhere",
    ),
    "missing user code": (
        GOOD + '[network]\nname = "mine.py:net"',
        "mine.py: expected a Python file, found none",
    ),
    "a missing recording": (
        GOOD + '[fleet.speed]\ntype = "recorded"\npath = "nowhere.csv"',
        "nowhere.csv",
    ),
    "a missing table": (
        GOOD.replace('"fedavg"', '"distreal"\ntable = "nowhere.safetensors"'),
        "nowhere.safetensors",
    ),
    "more devices than images": (GOOD.replace("size = 4", "size = 100000"), "Expected at most"),
    "too large a proxy": (GOOD + "[data]\nproxy = 100000", "proxy part"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_a_one_line_error(name, tmp_path, monkeypatch, capsys):
    text, part = WRONG[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PLIANT_DATA", raising=False)
    (tmp_path / "wrong.toml").write_text(text)
    code = main(["run", "wrong.toml"])
    output, errors = capsys.readouterr()
    assert (code, output) == (2, "")
    assert errors.startswith("pliant: ")
    assert errors.count("\n") == 1
    assert part in errors
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.toml"]


def test_there_are_thirty():
    assert len(WRONG) >= 30
