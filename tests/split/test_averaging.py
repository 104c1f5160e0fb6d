import torch

from pliant.split.averaging import average_params


def test_trimming_leaves_out_both_ends_of_each_coordinate():
    parts = {n: {"w": torch.tensor([float(n), -n]), "k": torch.tensor(n)} for n in (0, 1, 2, 3)}
    parts[4] = {"w": torch.tensor([9e5, -9e5]), "k": torch.tensor(1000)}
    trimmed = average_params(None, parts, 0.2)
    assert trimmed["w"].tolist() == [2.0, -2.0]  # of 1, 2, 3
    assert trimmed["k"] == 2
    assert average_params(None, parts, 0.5)["w"].tolist() == [2.0, -2.0]
    del parts[4]
    assert average_params(None, parts, 0.5)["w"].tolist() == [1.5, -1.5]
