import math

import pytest
import torch
from torch import nn

from pliant.nn.models.initialisation import check_positive, init_he_weights


@pytest.mark.parametrize(
    ("conv", "fan_out"),
    [(nn.Conv2d(64, 64, 3), 64 * 9), (nn.Conv2d(4096, 4096, 3, groups=4096), 9)],
)
def test_the_standard_deviation_follows_the_fan_out(conv, fan_out):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        init_he_weights(conv)
    assert conv.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.02)


@pytest.mark.parametrize("size", [0, -1, math.nan])
def test_the_error_names_a_size_that_is_not_positive(size):
    with pytest.raises(ValueError, match=r"^net: expected `b` above 0, got"):
        check_positive("net", {"a": 1, "b": size})
