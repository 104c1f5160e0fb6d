import tomllib
from pathlib import Path

import msgspec
import pytest

from pliant.experiment.build import build_experiment, build_search
from pliant.experiment.config import (
    Experiment,
    load_experiment,
    load_run_config,
    load_search,
    start_run,
)
from pliant.experiment.sweep import load_sweep
from pliant.nn.elastic import elastic
from pliant.nn.pareto_table import uniform_table
from pliant.nn.table_file import save_table
from pliant.table_search import StepTimeModel
from pliant.table_search.step_time import save_step_time_model
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
    net, data = build_experiment(load_experiment(plain))
    table = uniform_table(
        elastic(net, data.train.get_normalised(slice(0, 1))), rows=3, highest_rate=0.25
    )
    save_table(tmp_path / "tables" / "found.safetensors", table)
    return path, table


@pytest.mark.parametrize("method", ["distreal", "coherent"])
def test_the_path_of_a_table_is_relative_to_the_toml_file(spec, method):
    path, table = spec
    assert load_experiment(path, [f"method.type={method}"]).method.table == table


def test_a_run_resumes_without_the_file_of_its_table(spec, tmp_path):
    path, table = spec
    start_run(tmp_path / "run", load_experiment(path))
    (tmp_path / "tables" / "found.safetensors").unlink()
    assert load_run_config(tmp_path / "run").method.table == table


def test_a_matrix_may_vary_the_table(spec, tmp_path):
    path, table = spec
    other = msgspec.structs.replace(table, rates=table.rates[:2], shares=table.shares[:2])
    save_table(tmp_path / "other.safetensors", other)
    names = '["tables/found.safetensors", "other.safetensors"]'
    path.write_text(SPEC + f'[matrix]\n"method.table" = {names}\n')
    assert [run.experiment.method.table for run in load_sweep(path)] == [table, other]


def test_a_search_reads_the_same_file_and_needs_no_table(spec, tmp_path):
    path, _ = spec
    (tmp_path / "tables" / "found.safetensors").unlink()
    run = load_search(path, ["search.seed=3"])
    assert (run.search.rows, run.search.seed, run.network.name) == (8, 3, "digits_cnn")
    with pytest.raises(ValueError, match=r"run\.toml: unknown key `search\.ros`"):
        load_search(path, ["search.ros=3"])


def test_the_error_for_a_missing_table_has_its_path(spec, tmp_path):
    path, _ = spec
    (tmp_path / "tables" / "found.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"found\.safetensors"):
        load_experiment(path)


def test_no_device_of_any_seed_owns_an_image_of_the_search():
    root = Path(__file__).parents[2] / "experiments"
    search = load_search(root / "search" / "digits.toml")
    search_images = get_image_bytes(build_search(search)[1])
    assert len(search_images) == 2000
    raw = tomllib.loads((root / "digits" / "table.toml").read_text())
    fleet, data = {"size": raw["fleet"]["size"]}, raw["data"]
    for seed in range(5):
        spec = {"method": {"type": "fedavg"}, "fleet": fleet, "data": data, "seed": seed}
        _, federated = build_experiment(decode(spec, Experiment))
        device_images = [
            get_image_bytes(federated.train.select(share)) for share in federated.shares
        ]
        assert sum(map(len, device_images)) == 6000
        assert not any(search_images & images for images in device_images)


def get_image_bytes(images):
    """Return the pixels of each image, which identify it: no two bundled digits are equal."""
    return {image.numpy().tobytes() for image in images.pixels}


def test_the_path_of_a_profile_is_relative_to_the_toml_file(tmp_path):
    path = tmp_path / "search.toml"
    path.write_text('[search]\ncost = "seconds"\nprofile = "costs/profile.json"\n')
    with pytest.raises(FileNotFoundError, match=r"profile\.json"):
        load_search(path)
    profile = StepTimeModel(start=1e-3, per_mac=2e-10, per_byte=3e-11, batch=32, error=0.05)
    save_step_time_model(tmp_path / "costs" / "profile.json", profile)
    assert load_search(path).search.profile == profile


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "malformed"),
        ('{"format": 2, "start": 1.0}', "per_mac"),
        ('{"format": 2, "start": -1.0}', "start"),
    ],
)
def test_the_error_for_an_invalid_profile_has_its_path(tmp_path, text, message):
    (tmp_path / "profile.json").write_text(text)
    path = tmp_path / "search.toml"
    path.write_text('[search]\nprofile = "profile.json"\n')
    with pytest.raises(ValueError, match=rf"profile\.json: expected a profile: .*{message}"):
        load_search(path)


def test_the_table_of_an_inner_method_is_loaded_too(spec):
    path, table = spec
    path.write_text(
        path.read_text()
        .replace('type = "distreal"', 'type = "fedbuff"')
        .replace('table = "tables', 'inner = { type = "distreal", table = "tables')
        .replace('.safetensors"', '.safetensors" }')
    )
    assert load_experiment(path).method.inner.table == table


def test_the_profile_of_a_clock_is_read_and_relative_to_the_toml_file(tmp_path):
    profile = StepTimeModel(start=1e-3, per_mac=2e-10, per_byte=3e-11, batch=32, error=0.05)
    save_step_time_model(tmp_path / "clock.json", profile)
    path = tmp_path / "run.toml"
    path.write_text('step_time = "clock.json"\n[method]\ntype = "fedavg"\n[fleet]\nsize = 2\n')
    assert load_experiment(path).step_time == profile
