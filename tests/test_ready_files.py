"""Every file under experiments/ loads as it stands, and begins with what a reader wants to know."""

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
from pliant.compare import members
from pliant.experiment import Experiment, Network, load_search, weights
from pliant.nn.cut import cuts
from pliant.split import AnySplit
from pliant.value import decode, encode

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "experiments").rglob("*.toml"))
TABLE = re.compile(r"^\.\./\.\./runs/search/([\w-]+)/table\.safetensors$")
PAPER = [path for path in FILES if path.parent.name == "distreal"]
FULL = [path for path in PAPER if not path.stem.endswith("-small")]
# what can be built in a moment: all but the full-size files of DISTREAL, and what only searches
CHEAP = [
    path
    for path in FILES
    if path not in FULL and "method" in tomllib.loads(path.read_text()).get("matrix", {})
]


def name(path):
    return str(path.relative_to(ROOT))


def header(path):
    """The comment that a file begins with, as one text."""
    lines = path.read_text().splitlines()
    comment = next((number for number, line in enumerate(lines) if not line.startswith("#")), 0)
    return " ".join(line.removeprefix("#").strip() for line in lines[:comment])


def tables(raw):
    """The paths of tables that a file's methods want."""
    if isinstance(raw, dict):
        found = [raw["table"]] if isinstance(raw.get("table"), str) else []
        return found + [path for value in raw.values() for path in tables(value)]
    return []


def is_search(path):
    raw = tomllib.loads(path.read_text())
    return "matrix" not in raw and "method" not in raw


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """A copy of experiments/ with a table where each search would put one.

    Tables are results and not in the repository: they are the only thing that may be missing.
    """
    root = tmp_path_factory.mktemp("ready")
    shutil.copytree(ROOT / "experiments", root / "experiments")
    net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    table = pl.uniform_table(net, rows=3)
    for path in FILES:
        for wanted in tables(tomllib.loads(path.read_text())):
            place = (root / path.relative_to(ROOT)).parent / wanted
            place.parent.mkdir(parents=True, exist_ok=True)
            pl.save_table(place, table)
    return root


def test_there_are_files():
    assert {path.parent.name for path in FILES} >= {"adasplit", "digits", "distreal", "search"}


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_file_loads(path, copied):
    if is_search(path):
        assert load_search(path).data.proxy is not None
        return
    found = members(copied / path.relative_to(ROOT))
    assert found
    assert all(isinstance(member.experiment, Experiment) for member in found)
    assert len({member.name for member in found}) == len(found), "two runs share a folder"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_file_begins_with_its_command(path):
    verb = "search" if is_search(path) else "compare"
    assert path.read_text().startswith(f"# pliant {verb} {name(path)}")


SHAPES = {
    "digits": (1, 28, 10), "cifar10": (3, 32, 10), "cifar100": (3, 32, 100),
    "mixed_cifar": (3, 32, 10), "mixed_noniid": (3, 32, 10), "halved.py:cifar10": (3, 16, 10),
}  # fmt: skip


@lru_cache
def built(network, data):
    """The elastic network of a file, for images like those of its data."""
    channels, side, classes = SHAPES[data]
    labels = torch.arange(classes).repeat(2)
    pixels = torch.zeros(len(labels), channels, side, side)
    images = pl.Images.from_tensors(pixels, labels, classes=classes)
    shared = pl.data.Source(images, images).share(pl.Iid(), devices=1, proxy=1)
    net = weights(decode(json.loads(network), Network), shared, seed=0)
    example = torch.zeros(1, channels, side, side)
    return pl.elastic(net, example), {place.after for place in cuts(net, example)}


@pytest.mark.parametrize("path", CHEAP, ids=name)
def test_every_method_of_a_file_fits_its_network(path, copied):
    """Made from what a file says, up to the first round: the data alone are not those it names."""
    for member in members(copied / path.relative_to(ROOT)):
        asked = member.experiment
        data = asked.data.name.rpartition("/")[2]  # of a user's own: without its folder
        net, places = built(json.dumps(encode(asked.network), sort_keys=True), data)
        if isinstance(asked.method, AnySplit):
            assert asked.method.cut in places
            continue
        method = asked.method
        if getattr(method, "table", None) is not None:
            method = msgspec.structs.replace(method, table=pl.uniform_table(net, rows=3))
        assert method.plan(net) is not None


@pytest.mark.parametrize("path", PAPER, ids=name)
def test_a_file_of_the_paper_says_how_long_it_takes_and_what_to_expect(path):
    text = header(path)
    assert re.search(r"Time: estimated.*(minute|hour|day)", text), "how the time was estimated"
    assert re.search(r"Expect: .+\.", text)
    if path.stem.startswith(("fig5", "fig6")) and path in FULL:
        assert "the authors' final accuracy in per cent" in text


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_table_that_a_file_wants_is_made_by_a_search_for_the_same_network(path, copied):
    wanted = tables(tomllib.loads(path.read_text()))
    for text in wanted:
        match = TABLE.match(text)
        assert match, f"{text}: expected the place where `pliant search` puts its table"
        sources = [one for one in FILES if one.stem == match[1] and is_search(one)]
        assert len(sources) == 1, f"{text}: expected one search of that name, found {sources}"
        sought = load_search(copied / sources[0].relative_to(ROOT))
        for member in members(copied / path.relative_to(ROOT)):
            if getattr(member.experiment.method, "table", None) is not None:
                assert member.experiment.network == sought.network
                assert member.experiment.data.name == sought.data.name


@pytest.mark.parametrize("path", FULL, ids=name)
def test_a_full_size_file_has_a_small_twin(path):
    twin = path.with_stem(f"{path.stem}-small")
    assert twin.exists()
    mine, other = (tomllib.loads(one.read_text()) for one in (path, twin))
    assert set(mine.get("matrix", {}).get("method", ())) == set(
        other.get("matrix", {}).get("method", ())
    ), "the twin compares the same methods"
