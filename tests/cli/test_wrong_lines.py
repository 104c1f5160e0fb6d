"""A hundred more wrong command lines: each gives one line that says what, and writes nothing."""

import pytest

from pliant.cli import WRONG_INPUT, main

FILES = {
    "good.toml": 'rounds = 1\n[method]\ntype = "fedavg"\n[fleet]\nsize = 4\n',
    "mixed.toml": """
rounds = 1
method = { type = "distreal", budget = "paced", local = { drop_short = true } }
fleet = { size = 4 }
""",
    "empty.toml": "",
    "broken.py": "import does_not_exist\n",
    "syntax.py": "def net(:\n",
    "raises.py": """
def net():
    raise RuntimeError("no network today")

def data():
    return 1 / 0

def number():
    return 3
""",
    "locked": "a file, not a folder",
}

# a command line, and part of its error message
WRONG = [
    ("run --rezume runs", "Unknown option: --rezume. Did you mean --resume?"),
    ("run good.toml --out", 'Command "run" parameter --out requires an argument.'),
    ("run good.toml --seed 3", "Unknown option: --seed. Did you mean --spec?"),
    (
        "run good.toml --json --out locked",
        "locked: expected nothing there yet, found a file or folder",
    ),
    ("run good.toml rounds=", "Expected `int` at `rounds`, got ''"),
    ("run good.toml rounds=-1", "Expected `int` >= 1 at `rounds`, got -1"),
    ("run good.toml rounds=1e3", "Expected `int` at `rounds`, got 1000.0"),
    ("run good.toml rounds=10**9", "Expected `int` at `rounds`, got '10**9'"),
    ("run good.toml rounds=true", "Expected `int` at `rounds`, got True"),
    ("run good.toml seed=zero", "Expected `int` at `seed`, got 'zero'"),
    ("run good.toml seed=0.5", "Expected `int` at `seed`, got 0.5"),
    ("run good.toml per_round=0", "Expected `int` >= 1 at `per_round`, got 0"),
    (
        "run good.toml per_round=5",
        "Expected `per_round` of at most 4, the devices of the fleet, got 5",
    ),
    ("run good.toml per_round=many", "Expected `int` at `per_round`, got 'many'"),
    ("run good.toml checkpoint_every=0", "Expected `int` >= 1 at `checkpoint_every`, got 0"),
    ("run good.toml select=fastest", "unknown `select` = 'fastest'; there are"),
    (
        "run good.toml select.type=fastest select.candidates=0.5",
        "Expected `float` >= 1.0 at `select.candidates`, got 0.5",
    ),
    ("run good.toml fleet.size=0", "Expected `int` >= 1 at `fleet.size`, got 0"),
    ("run good.toml fleet.size=-4", "Expected `int` >= 1 at `fleet.size`, got -4"),
    ("run good.toml fleet.size=1e6", "Expected `int` at `fleet.size`, got 1000000.0"),
    ("run good.toml fleet=4", "Expected a table at `fleet`, got 4"),
    ("run good.toml fleet.speed=0.5", "Expected a table at `fleet.speed`, got 0.5"),
    ("run good.toml fleet.speed.type=slow", "unknown `fleet.speed.type` = 'slow'"),
    (
        "run good.toml fleet.speed.type=changing fleet.speed.low=2.0",
        "Expected finite low <= high - in ChangingTrace, got low 2.0 and",
    ),
    ("run good.toml fleet.classes=phones", "unknown device classes 'phones'"),
    ("run good.toml fleet.classes=[]", "Expected a list of length >= 1 at `fleet.classes`, got []"),
    (
        "run good.toml fleet.round_seconds=0",
        "Expected `float` > 0.0 at `fleet.round_seconds`, got 0",
    ),
    ("run good.toml fleet.memory=3", "unknown key `fleet.memory`"),
    ("run good.toml method=fedavg", "Expected a table at `method`, got 'fedavg'"),
    ("run good.toml method.type=", "unknown `method.type` = ''"),
    (
        "run good.toml method.type=fedavgg",
        "unknown `method.type` = 'fedavgg'; did you mean 'fedavg'?",
    ),
    (
        "run good.toml method.type=distreal method.table=none.safetensors",
        "none.safetensors: expected a file or folder, found none",
    ),
    (
        "run good.toml method.type=distreal method.table=good.toml",
        "good.toml: expected a table of `pliant search`",
    ),
    ("run good.toml method.type=distreal method.budget=later", "unknown `method.budget` = 'later'"),
    ("run good.toml method.local.batch=0", "Expected `int` >= 1 at `method.local.batch`, got 0"),
    (
        "run good.toml method.local.epochs=-1",
        "Expected `int` >= 1 at `method.local.epochs`, got -1",
    ),
    (
        "run good.toml method.local.optimiser.type=lbfgs",
        "unknown `method.local.optimiser.type` = 'lbfgs'",
    ),
    (
        "run good.toml method.local.optimiser.lr=fast",
        "expected a key `method.local.optimiser.type`, found none",
    ),
    (
        "run good.toml method.type=nowhere.py:Mine",
        "nowhere.py:Mine: expected a Python file, found none",
    ),
    (
        "run good.toml method.type=good.toml:Mine",
        "Expected an installed module 'good.toml', found none",
    ),
    (
        "run good.toml method.type=json:loads",
        "json:loads: expected a method class with a field `local`, got",
    ),
    (
        "run mixed.toml method.type=adasplit",
        "unknown keys `method.budget`, `method.local.drop_short`",
    ),
    (
        "run mixed.toml method.type=splitfed",
        "unknown keys `method.budget`, `method.local.drop_short`",
    ),
    ("run good.toml network=resnet20", "Expected a table at `network`, got 'resnet20'"),
    ("run good.toml network.name=", "unknown network ''"),
    ("run good.toml network.name=nowhere.py:net", "nowhere.py: expected a Python file, found none"),
    (
        "run good.toml network.name=broken.py:net",
        "broken.py:1: ModuleNotFoundError: No module named 'does_not_exist'",
    ),
    (
        "run good.toml network.name=broken.py:absent",
        "broken.py:1: ModuleNotFoundError: No module named 'does_not_exist'",
    ),
    (
        "run good.toml network.name=syntax.py:net",
        "syntax.py:1: SyntaxError: invalid syntax (syntax.py, line 1)",
    ),
    ("run good.toml network.name=raises.py:net", "raises.py:3: RuntimeError: no network today"),
    (
        "run good.toml network.name=json:loads",
        "network json:loads: missing a required argument: 's'",
    ),
    (
        "run good.toml network.options.depth=3",
        "network digits_cnn: got an unexpected keyword argument 'depth'",
    ),
    ("run good.toml network.options.hidden=0", "cnn: expected `hidden` above 0, got 0"),
    (
        "run good.toml network.options.hidden=wide",
        "Expected `int | float | array` at `network.options....`",
    ),
    (
        "run good.toml network.input=[1,28,28]",
        "Expected both `input` and `classes` or neither, got only `input`,",
    ),
    (
        "run good.toml network.input=[3,8,8] network.classes=10",
        "Expected `input` and `classes` in [network] as in [data], (1, 28,",
    ),
    ("run good.toml data.name=", "femnist, got ''"),
    (
        "run good.toml data.name=mnist data.root=nowhere",
        "nowhere/mnist/train-images-idx3-ubyte: expected this file (or",
    ),
    ("run good.toml data.name=raises.py:data", "raises.py:6: ZeroDivisionError: division by zero"),
    (
        "run good.toml data.proxy=-1",
        "Expected a proxy part of 0 to 7999 images or a fraction below 1,",
    ),
    (
        "run good.toml data.proxy=8000",
        "Expected a proxy part of 0 to 7999 images or a fraction below 1,",
    ),
    ("run good.toml data.partition.type=sorted", "unknown `data.partition.type` = 'sorted'"),
    (
        "run good.toml data.partition.type=dirichlet data.partition.alpha=0",
        "Expected `float` >= 0.001 at `data.partition.alpha`, got 0",
    ),
    (
        "run good.toml data.partition.type=by-group",
        "unknown `data.partition.type` = 'by-group'; did you mean",
    ),
    ("run good.toml data.devices=9000", "Expected at most 7000 devices for 7000 samples, got 9000"),
    (
        "run good.toml data.device_tests=1.0",
        "Expected `float` < 1.0 at `data.device_tests`, got 1.0",
    ),
    ("run good.toml rules.late=never", "unknown `rules.late` = 'never'"),
    ("run good.toml rules.quorum=2", "Expected `float` <= 1.0 at `rules.quorum`, got 2"),
    ("run good.toml rules.grace=-1", "Expected `float` >= 0.0 at `rules.grace`, got -1"),
    ("run good.toml evaluation.every=0", "Expected `int` >= 1 at `evaluation.every`, got 0"),
    ("run good.toml compression.type=zip", "unknown `compression.type` = 'zip'"),
    (
        "run good.toml compression.type=topk compression.share=2.0",
        "Expected `float` <= 1.0 at `compression.share`, got 2.0",
    ),
    ("run good.toml workers.type=threads", "unknown `workers.type` = 'threads'"),
    ("run good.toml workers.count=0", "expected a key `workers.type`, found none"),
    ("run good.toml seconds=0", "Expected `float` > 0.0 at `seconds`, got 0"),
    ("run good.toml seconds=-3", "Expected `float` > 0.0 at `seconds`, got -3"),
    ("run good.toml matrix.seed=[1]", "got a [matrix] of them: use `pliant compare good.toml`"),
    ("run good.toml unknown.deep.key=1", "unknown key `unknown`"),
    ("run good.toml rounds=1 rounds", "Expected key=value, got 'rounds'"),
    ("run --resume good.toml", "good.toml/config.json: expected folders along this path, found a"),
    ("run --resume folder rounds=3", "folder: expected a run folder, found no config.json"),
    ("run bytes.toml", "bytes.toml: expected a TOML file in UTF-8"),
    ("run empty.toml", "empty.toml: expected a key `method`, found none"),
    (
        "compare good.toml matrix.seed=[]",
        "expected a list or a table of values at matrix.seed, got []",
    ),
    (
        "compare good.toml matrix.sed=[1]",
        "good.toml with sed = 1: unknown key `sed`; did you mean 'seed'?",
    ),
    (
        "compare good.toml matrix.rounds=[1,0]",
        "good.toml with rounds = 0: Expected `int` >= 1 at `rounds`, got 0",
    ),
    ("compare good.toml matrix=3", "expected a table [matrix], got 3"),
    (
        "compare good.toml matrix.seed=[0] --target 0",
        "Expected a target accuracy above 0 and up to 1, got 0.0",
    ),
    (
        "compare good.toml matrix.seed=[0] --out locked",
        "locked/seed=0/events.jsonl: expected folders along this path,",
    ),
    (
        "compare good.toml --fresh=maybe",
        'Invalid value for --fresh: unable to convert "maybe" into bool.',
    ),
    ("compare folder", "folder: expected a file, found a folder"),
    ("report good.toml", "expected the folder of a run or of runs"),
    ("report folder", "folder: expected a finished round or a table, found neither"),
    (
        "report folder --target none",
        'Invalid value for --target: unable to convert "none" into float.',
    ),
    ("dash good.toml", "expected a folder of runs"),
    ("dash folder --port -1", "Expected a port from 0 to 65535, got -1"),
    ("dash folder --port http", 'Invalid value for --port: unable to convert "http" into int.'),
    ("search good.toml search.rows=two", "Expected `int` at `search.rows`, got 'two'"),
    (
        "search good.toml search.algorithm.rounds=-1",
        "expected a key `search.algorithm.type`, found none",
    ),
    ("search good.toml search.short.batches=0", "unknown key `search.short`"),
    (
        "search good.toml search.profile=nowhere.json",
        "nowhere.json: expected a file or folder, found none",
    ),
    (
        "inspect resnet20 --shape 3,64",
        "resnet20: expected a shape that the network can process, got 3,64",
    ),
    ("inspect resnet20 --shape 3,x,3", "Expected a shape like 3,32,32, got '3,x,3'"),
    ("inspect resnet20 --shape 0,32,32", "Expected a shape like 3,32,32, got '0,32,32'"),
    (
        "inspect resnet20 --shape 5,32,32",
        "resnet20: expected a shape that the network can process, got",
    ),
    ("inspect nowhere.py:net", "nowhere.py: expected a Python file, found none"),
    ("inspect raises.py:net --shape 1,8,8", "raises.py:3: RuntimeError: no network today"),
    ("inspect broken.py:net", "broken.py:1: ModuleNotFoundError: No module named 'does_not_exist'"),
    ("inspect json:loads --shape 3,32,32", "json:loads: expected a function without arguments"),
    ("inspect raises.py:number --shape 3,8,8", "raises.py:number: expected an nn.Module, got int"),
    ("inspect raises.py:net", "raises.py:3: RuntimeError: no network today"),
    ("data get", 'Command "data get" parameter --name requires an argument.'),
    ("data check nowhere", "Unused Tokens: ['nowhere']."),
    ("bench elastic resnet20 --steps 0", "Unknown option: --steps. Did you mean --seconds?"),
    ("bench nothing", "unknown command 'nothing'"),
    ("deploy up nowhere.toml", "nowhere.toml: expected a file or folder, found none"),
    ("deploy up good.toml --devices 0", "Expected --devices of 1 or more, got 0"),
    ("deploy up good.toml --devices -1", "Expected --devices of 1 or more, got -1"),
    ("deploy up good.toml --port 99999999", "Expected --port from 1 to 65535, got 99999999"),
    (
        "deploy up good.toml --pace slow",
        'Invalid value "slow" for --pace. Choose from: "measured",',
    ),
    ("deploy up good.toml rounds=0", "Expected `int` >= 1 at `rounds`, got 0"),
    ("deploy init", 'Command "deploy init" parameter --folder requires an argument.'),
    ("deploy down", "unknown command 'down'; there are init, up"),
    ("server nowhere.toml --insecure", "nowhere.toml: expected a file or folder, found none"),
    ("server good.toml", "Expected either --keys FOLDER (see `pliant deploy init`) or"),
    (
        "server good.toml --insecure --keys keys",
        "Expected either --keys FOLDER (see `pliant deploy init`) or",
    ),
    (
        "server good.toml --keys nowhere",
        "nowhere: expected the keys of `pliant deploy init`, found none",
    ),
    (
        "server good.toml --insecure --allowance -1",
        "Expected `float` >= 0.0 at `allowance`, got -1.0",
    ),
    ("device", "Expected --server HOST:PORT or --dry-run EXPERIMENT.toml"),
    ("device --server nowhere", "Expected either --keys FOLDER or --insecure"),
    ("device enrol", 'Command "device enrol" parameter --server requires an argument.'),
    (
        "device --server 127.0.0.1:1 --data nowhere",
        "Expected an existing folder for --data, got nowhere",
    ),
    ("completion tcsh", 'Invalid value "tcsh" for SHELL. Choose from: "bash", "zsh",'),
    ("demo now", "Unused Tokens: ['now']."),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    (folder / "folder").mkdir()
    return folder


def list_paths(folder):
    paths = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return sorted(path for path in paths if "__pycache__" not in path)


@pytest.mark.parametrize(("line", "part"), WRONG, ids=[line for line, _ in WRONG])
def test_a_wrong_command_line_is_refused_in_one_line(line, part, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PLIANT_DATA", raising=False)
    before = list_paths(folder)
    code = main(line.split())
    output, errors = capsys.readouterr()
    assert (code, output) == (WRONG_INPUT, ""), errors
    assert errors.startswith("pliant: ")
    assert errors.count("\n") == 1
    assert part in errors
    assert "internal error" not in errors
    assert list_paths(folder) == before


def test_there_are_a_hundred():
    assert len({line for line, _ in WRONG}) >= 100
