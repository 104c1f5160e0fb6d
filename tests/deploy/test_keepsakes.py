import torch

from pliant.deploy.keepsake import Keepsakes


def test_what_counted_is_recalled_and_the_rest_forgotten(tmp_path):
    keepsakes = Keepsakes(tmp_path)
    keepsakes.keep(3, {"variate": torch.ones(2)}, {"weight": torch.zeros(1)})
    keepsakes.keep(5, {"variate": torch.full((2,), 5.0)}, {})  # did not count
    memory, residual = Keepsakes(tmp_path).recall(3)
    assert memory["variate"].tolist() == [1.0, 1.0]
    assert residual["weight"].tolist() == [0.0]
    assert Keepsakes(tmp_path).recall(5) == ({}, {})


def test_a_device_that_never_counted_begins_anew(tmp_path):
    keepsakes = Keepsakes(tmp_path)
    keepsakes.keep(0, {"variate": torch.ones(2)}, {})
    assert keepsakes.recall(None) == ({}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_as_if_it_were_not_there(tmp_path):
    keepsakes = Keepsakes(tmp_path)
    keepsakes.keep(3, {"variate": torch.ones(2)}, {})
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    assert keepsakes.recall(3) == ({}, {})


def test_nothing_to_keep_is_no_file(tmp_path):
    Keepsakes(tmp_path).keep(3, {}, {})
    assert list(tmp_path.iterdir()) == []
