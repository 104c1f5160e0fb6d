"""The files in docs/deploy.md can be deployed."""

import re
from pathlib import Path

import pytest

from pliant.cli.server import check_experiment
from pliant.experiment.config import load_experiment

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
