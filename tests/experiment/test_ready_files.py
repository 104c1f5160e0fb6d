"""Every file in experiments/ loads, and starts with its command, time and expected result."""

import json
import re
import shutil
import tomllib
from functools import lru_cache
from pathlib import Path

import msgspec
import pytest
import torch

import pliant as pl
from pliant.engine.worker_context import WorkerContext
from pliant.experiment.build import build_network
from pliant.experiment.config import Experiment, NetworkConfig, load_search
from pliant.experiment.sweep import load_sweep
from pliant.methods.verbs import get_inner_method
from pliant.nn.cut import find_cut_points
from pliant.split import AnySplit
from pliant.value import decode, encode

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "experiments").rglob("*.toml"))
TABLE = re.compile(r"^\.\./\.\./runs/search/([\w-]+)/table\.safetensors$")
PAPER = [path for path in FILES if path.parent.name == "distreal"]
FULL = [path for path in PAPER if not path.stem.endswith("-small")]
# quick to build: all but the full-size files of DISTREAL and the searches
CHEAP = [
    path
    for path in FILES
    if path not in FULL and "method" in tomllib.loads(path.read_text()).get("matrix", {})
]


def get_name(path):
    return str(path.relative_to(ROOT))


def read_header(path):
    """Return the leading comment of a file as one text."""
    lines = path.read_text().splitlines()
    end = next((number for number, line in enumerate(lines) if not line.startswith("#")), 0)
    return " ".join(line.removeprefix("#").strip() for line in lines[:end])


def find_table_paths(raw):
    """Return the paths of the tables that the methods of a file use."""
    if isinstance(raw, dict):
        paths = [raw["table"]] if isinstance(raw.get("table"), str) else []
        return paths + [path for value in raw.values() for path in find_table_paths(value)]
    return []


def is_search(path):
    raw = tomllib.loads(path.read_text())
    return "matrix" not in raw and "method" not in raw


@pytest.fixture(scope="module")
def copy_root(tmp_path_factory):
    """Copy experiments/ and add a table where each search would write one.

    Tables are results and not in the repository; nothing else may be missing.
    """
    root = tmp_path_factory.mktemp("ready")
    shutil.copytree(ROOT / "experiments", root / "experiments")
    net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    table = pl.uniform_table(net, rows=3)
    for path in FILES:
        for relative in find_table_paths(tomllib.loads(path.read_text())):
            table_path = (root / path.relative_to(ROOT)).parent / relative
            table_path.parent.mkdir(parents=True, exist_ok=True)
            pl.save_table(table_path, table)
    return root


def test_there_are_files():
    assert {path.parent.name for path in FILES} >= {"adasplit", "digits", "distreal", "search"}


@pytest.mark.parametrize("path", FILES, ids=get_name)
def test_a_file_loads(path, copy_root):
    if is_search(path):
        assert load_search(path).data.proxy is not None
        return
    runs = load_sweep(copy_root / path.relative_to(ROOT))
    assert runs
    assert all(isinstance(run.experiment, Experiment) for run in runs)
    assert len({run.name for run in runs}) == len(runs), "two runs share a folder"


@pytest.mark.parametrize("path", FILES, ids=get_name)
def test_a_file_starts_with_its_command(path):
    command = "pliant search" if is_search(path) else "pliant compare"
    if path.stem.startswith("tune_"):
        command = "python scripts/tune.py"
    assert path.read_text().startswith(f"# {command} {get_name(path)}")


SHAPES = {
    "digits": (1, 28, 10), "mnist": (1, 28, 10), "cifar10": (3, 32, 10), "cifar100": (3, 32, 100),
    "mixed_cifar": (3, 32, 10), "mixed_noniid": (3, 32, 10), "halved.py:cifar10": (3, 16, 10),
    "validation.py:cifar10": (3, 32, 10), "validation.py:fashion": (1, 28, 10),
    "validation.py:digits": (1, 28, 10), "fashion_mnist": (1, 28, 10),
    "validation.py:mnist": (1, 28, 10), "halved.py:cifar10_validation": (3, 16, 10),
}  # fmt: skip
SEQUENCES = {
    "08_text_and_signals.py:load_text": (torch.zeros(1, 24, dtype=torch.long), 4),
    "08_text_and_signals.py:load_signals": (torch.zeros(1, 28, 28), 10),
}


@lru_cache
def build_elastic(network, data):
    """Return the elastic network and cut points of a file, for samples like those of its data."""
    if data in SEQUENCES:
        example, classes = SEQUENCES[data]
    else:
        channels, side, classes = SHAPES[data]
        example = torch.zeros(1, channels, side, side)
    labels = torch.arange(classes).repeat(2)
    samples = example.repeat(len(labels), *[1] * (example.dim() - 1))
    images = pl.ImageDataset.from_tensors(samples, labels, classes=classes)
    shared = pl.data.TrainTestData(images, images).share(pl.Iid(), devices=1, proxy=1)
    net = build_network(decode(json.loads(network), NetworkConfig), shared, seed=0)
    return pl.elastic(net, example), {point.after for point in find_cut_points(net, example)}


@pytest.mark.parametrize("path", CHEAP, ids=get_name)
def test_every_method_of_a_file_fits_its_network(path, copy_root):
    """Build everything but the data, up to the first round."""
    for run in load_sweep(copy_root / path.relative_to(ROOT)):
        experiment = run.experiment
        data = experiment.data.name.rpartition("/")[2]  # without the folder of user code
        network = json.dumps(encode(experiment.network), sort_keys=True)
        net, cut_points = build_elastic(network, data)
        if isinstance(experiment.method, AnySplit):
            assert experiment.method.cut in cut_points
            continue
        method = experiment.method
        if getattr(method, "table", None) is not None:
            table = pl.uniform_table(net, rows=3)
            table = msgspec.structs.replace(table, gains=(0.1, 0.2, 0.3))  # as if it were measured
            method = msgspec.structs.replace(method, table=table)
        assert WorkerContext(net, None, get_inner_method(method)).budget_policy is not None


@pytest.mark.parametrize("path", PAPER, ids=get_name)
def test_a_file_of_the_paper_draws_filters_independently(path, copy_root):
    if is_search(path):
        assert load_search(path).search.objective.choice == "bernoulli"
        return
    for run in load_sweep(copy_root / path.relative_to(ROOT)):
        assert getattr(run.experiment.method, "choice", "bernoulli") == "bernoulli"


@pytest.mark.parametrize("path", PAPER, ids=get_name)
def test_a_file_of_the_paper_gives_its_time_and_expected_result(path):
    text = read_header(path)
    assert re.search(r"Time: estimated.*(minute|hour|day)", text), "how the time was estimated"
    assert re.search(r"Expect: .+\.", text)
    if path.stem.startswith(("fig5", "fig6")) and path in FULL:
        assert "the authors' final accuracy in per cent" in text


@pytest.mark.parametrize("path", FILES, ids=get_name)
def test_a_table_in_a_file_comes_from_a_search_for_the_same_network(path, copy_root):
    for table_path in find_table_paths(tomllib.loads(path.read_text())):
        match = TABLE.match(table_path)
        assert match, f"{table_path}: expected the path at which `pliant search` writes its table"
        files = [file for file in FILES if file.stem == match[1] and is_search(file)]
        assert len(files) == 1, f"{table_path}: expected one search with this name, got {files}"
        search = load_search(copy_root / files[0].relative_to(ROOT))
        for run in load_sweep(copy_root / path.relative_to(ROOT)):
            if getattr(run.experiment.method, "table", None) is not None:
                assert run.experiment.network == search.network
                data = run.experiment.data.name.removesuffix("_validation")  # a part of it
                assert data.rpartition("validation.py:")[2] == search.data.name


@pytest.mark.parametrize("path", FULL, ids=get_name)
def test_a_full_size_file_has_a_small_version(path):
    small_path = path.with_stem(f"{path.stem}-small")
    assert small_path.exists()
    full, small = (tomllib.loads(file.read_text()) for file in (path, small_path))
    assert set(full.get("matrix", {}).get("method", ())) == set(
        small.get("matrix", {}).get("method", ())
    ), "both must compare the same methods"
