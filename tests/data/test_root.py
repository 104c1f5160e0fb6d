from pathlib import Path

import pytest

from pliant.data import data_root
from pliant.data.root import locate


def test_an_argument_goes_before_the_environment_and_that_before_the_cache():
    environment = {"PLIANT_DATA": "/from/environment", "XDG_CACHE_HOME": "/cache"}
    assert data_root(Path("/mine"), environment) == Path("/mine")
    assert data_root(None, environment) == Path("/from/environment")
    assert data_root(None, {"XDG_CACHE_HOME": "/cache"}) == Path("/cache/pliant")
    assert data_root(None, {}).name == "pliant"


def test_files_are_found_in_the_publishers_folder_or_the_root_plain_or_packed(tmp_path):
    (tmp_path / "file.gz").touch()
    assert locate(tmp_path, "set", "file", "set") == tmp_path / "file.gz"
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "file").touch()
    assert locate(tmp_path, "set", "file", "set") == tmp_path / "set" / "file"


def test_a_missing_file_is_told_with_its_place_and_the_command(tmp_path):
    with pytest.raises(FileNotFoundError) as told:
        locate(tmp_path, "cifar-10-batches-bin", "test_batch.bin", "cifar10")
    assert str(tmp_path / "cifar-10-batches-bin" / "test_batch.bin") in str(told.value)
    assert "pliant data get cifar10" in str(told.value)
