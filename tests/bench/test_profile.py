"""Profiles of step times, measured on this machine."""

import pytest
import torch

from pliant.bench import profile
from pliant.bench.profile import WIDTHS, _draw_sizes
from pliant.data import AS_IS
from pliant.nn.elastic import elastic
from pliant.nn.models import digits_cnn, resnet20


def test_sizes_cover_images_mini_batches_and_widths():
    net = elastic(resnet20(width=4), torch.zeros(1, 3, 32, 32))
    samples = _draw_sizes(net, 36)
    sides = {sample.net.program.input_shapes[0][-1] for sample in samples}
    assert min(sides) < 20
    assert max(sides) == 32
    assert {sample.scale.batch for sample in samples} == {0.5, 1.0}
    widths = {round(sum(s.subnet.counts) / sum(net.sizes), 3) for s in samples}
    assert len(widths) == len(WIDTHS)
    for half in (samples[::2], samples[1::2]):  # one is fitted, the other held out
        assert {sample.scale.side is None for sample in half} == {True, False}
    assert samples[0].scale == AS_IS
    assert samples[0].subnet.counts == net.sizes


def test_a_network_of_one_size_is_profiled_by_width_and_mini_batch():
    net = elastic(digits_cnn(), torch.zeros(1, 1, 28, 28))
    samples = _draw_sizes(net, 16)
    assert {sample.scale.side for sample in samples} == {None}
    assert {sample.scale.batch for sample in samples} == {0.5, 1.0}


@pytest.mark.slow
def test_the_full_step_is_predicted_about_as_it_was_measured():
    fit = profile.measure(
        "resnet20", seconds=6.0, subnets=16, batch=8, sizes=True, options={"width": 4}
    )
    net = elastic(resnet20(width=4), torch.zeros(1, 3, 32, 32))
    predicted = fit.profile.predict_seconds(net, net.full)
    assert predicted == pytest.approx(fit.seconds[0], rel=0.5)
