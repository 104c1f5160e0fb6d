import tomllib
from pathlib import Path

import msgspec
import pytest

from pliant.compare import members
from pliant.experiment import (
    Experiment,
    begin,
    build,
    build_search,
    load_experiment,
    load_search,
    recall,
)
from pliant.explore import Profile, save_table, uniform_table
from pliant.nn.elastic import elastic
from pliant.value import decode

SPEC = """
[network]
name = "digits_cnn"
[data]
proxy = 100
[fleet]
size = 4
[method]
type = "distreal"
table = "tables/found.safetensors"
[search]
rows = 8
"""


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(SPEC)
    plain = tmp_path / "plain.toml"
    plain.write_text(SPEC.replace('table = "tables/found.safetensors"', ""))
    net, data = build(load_experiment(plain))
    table = uniform_table(elastic(net, data.train.normalised(slice(0, 1))), rows=3, highest=0.25)
    save_table(tmp_path / "tables" / "found.safetensors", table)
    return path, table


@pytest.mark.parametrize("method", ["distreal", "coherent"])
def test_a_path_to_a_table_is_read_beside_the_toml_file(spec, method):
    path, table = spec
    assert load_experiment(path, [f"method.type={method}"]).method.table == table


def test_a_run_goes_on_without_the_tables_file(spec, tmp_path):
    path, table = spec
    begin(tmp_path / "run", load_experiment(path))
    (tmp_path / "tables" / "found.safetensors").unlink()
    assert recall(tmp_path / "run").method.table == table


def test_a_matrix_may_vary_the_table(spec, tmp_path):
    path, table = spec
    other = msgspec.structs.replace(table, rates=table.rates[:2], shares=table.shares[:2])
    save_table(tmp_path / "other.safetensors", other)
    names = '["tables/found.safetensors", "other.safetensors"]'
    path.write_text(SPEC + f'[matrix]\n"method.table" = {names}\n')
    assert [member.experiment.method.table for member in members(path)] == [table, other]


def test_a_search_reads_its_part_of_the_same_file_and_needs_no_table(spec, tmp_path):
    path, _ = spec
    (tmp_path / "tables" / "found.safetensors").unlink()
    run = load_search(path, ["search.seed=3"])
    assert (run.search.rows, run.search.seed, run.network.name) == (8, 3, "digits_cnn")
    with pytest.raises(ValueError, match=r"run\.toml: unknown key `search\.ros`"):
        load_search(path, ["search.ros=3"])


def test_a_missing_table_is_told_by_its_path(spec, tmp_path):
    path, _ = spec
    (tmp_path / "tables" / "found.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"found\.safetensors"):
        load_experiment(path)


def test_no_device_of_any_seed_owns_an_image_that_the_searched_table_has_seen():
    root = Path(__file__).parent.parent / "experiments"
    searched = load_search(root / "search" / "digits.toml")
    seen = digests(build_search(searched)[1])
    assert len(seen) == 2000
    raw = tomllib.loads((root / "digits" / "table.toml").read_text())
    fleet, data = {"size": raw["fleet"]["size"]}, raw["data"]
    for seed in range(5):
        spec = {"method": {"type": "fedavg"}, "fleet": fleet, "data": data, "seed": seed}
        _, shared = build(decode(spec, Experiment))
        owned = [digests(shared.shard(device)) for device in range(len(shared))]
        assert sum(map(len, owned)) == 6000
        assert not any(seen & each for each in owned)


def digests(images):
    """The embedded digits are all different, so their pixels name them."""
    return {image.numpy().tobytes() for image in images.pixels}


def test_a_path_to_a_profile_is_read_beside_the_toml_file(tmp_path):
    path = tmp_path / "search.toml"
    path.write_text('[search]\ncost = "seconds"\nprofile = "costs/profile.json"\n')
    with pytest.raises(FileNotFoundError, match=r"profile\.json"):
        load_search(path)
    profile = Profile(start=1e-3, per_mac=2e-10, per_byte=3e-11, batch=32, error=0.05)
    (tmp_path / "costs").mkdir()
    (tmp_path / "costs" / "profile.json").write_bytes(msgspec.json.encode(profile))
    assert load_search(path).search.profile == profile


@pytest.mark.parametrize(
    ("text", "told"),
    [("nothing", "malformed"), ('{"start": 1.0}', "per_mac"), ('{"start": -1.0}', "start")],
)
def test_a_profile_that_is_none_is_told_by_its_path(tmp_path, text, told):
    (tmp_path / "profile.json").write_text(text)
    path = tmp_path / "search.toml"
    path.write_text('[search]\nprofile = "profile.json"\n')
    with pytest.raises(ValueError, match=rf"profile\.json: expected a profile: .*{told}"):
        load_search(path)
