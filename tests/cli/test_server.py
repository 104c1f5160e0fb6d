"""The files in docs/deploy.md can be deployed."""

import re
from pathlib import Path

import numpy as np
import pytest

from pliant.cli.server import check_experiment
from pliant.experiment.build import build_search
from pliant.experiment.config import load_experiment, load_search
from pliant.nn.norm_statistics import ReestimatedStats, RunningStats

PAGE = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
FILES = re.findall(r"`(\w+\.toml)`[^`]*(?:`\w+`[^`]*)?```toml\n(.*?)^```", PAGE, re.M | re.S)


def test_the_page_has_a_federated_and_a_split_file():
    assert [name for name, _ in FILES] == ["digits.toml", "splitfed.toml"]


@pytest.mark.parametrize(("name", "text"), FILES)
def test_a_file_on_the_page_can_be_deployed(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    experiment = load_experiment(tmp_path / name)
    assert experiment.fleet.size == 3
    check_experiment(experiment)


def test_norm_statistics_are_reestimated_only_with_a_proxy(tmp_path):
    (tmp_path / "digits.toml").write_text(FILES[0][1])
    images = {"images": np.zeros((4, 28, 28), np.uint8), "labels": np.arange(4)}
    np.savez(tmp_path / "proxy.npz", **images)
    for overrides, kind in (((), RunningStats), (("server.proxy=proxy.npz",), ReestimatedStats)):
        experiment = check_experiment(load_experiment(tmp_path / "digits.toml", overrides))
        assert isinstance(experiment.evaluation.statistics, kind)


def test_a_search_uses_the_proxy_of_the_server(tmp_path):
    (tmp_path / "digits.toml").write_text(FILES[0][1])
    images = {"images": np.full((4, 28, 28), 7, np.uint8), "labels": np.arange(4)}
    np.savez(tmp_path / "proxy.npz", **images)
    _, proxy = build_search(
        load_search(tmp_path / "digits.toml", ["server.proxy=proxy.npz", "search.rows=8"])
    )
    assert (len(proxy), proxy.classes, int(proxy.pixels.min())) == (4, 10, 7)
