import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pliant.explore.profile import Profile, amounts, errors, fit
from pliant.nn.elastic import elastic
from pliant.nn.models import digits_cnn

PRICE = st.floats(1e-3, 10.0)


@given(start=PRICE, per_mac=PRICE, per_byte=PRICE)
def test_a_fit_without_noise_finds_the_three_constants(start, per_mac, per_byte):
    given_amounts = [(float(i * i), float(i)) for i in range(1, 9)]
    seconds = [start + per_mac * macs + per_byte * size for macs, size in given_amounts]
    found = fit(given_amounts, seconds, batch=4)
    assert errors(found, given_amounts, seconds).max() < 1e-6


def test_no_constant_is_negative():
    found = fit([(1.0, 9.0), (2.0, 5.0), (3.0, 1.0), (4.0, 0.5)], [1.0, 2.0, 3.0, 4.0], batch=1)
    assert min(found.start, found.per_mac, found.per_byte) >= 0
    assert found.per_mac == pytest.approx(1.0)


def test_time_is_the_sum_of_its_parts():
    net = elastic(digits_cnn(), torch.zeros(1, 1, 28, 28))
    macs, size = amounts(net, 0.25, batch=8)
    assert macs == 8 * net.macs(0.25, training=True)
    assert size == 8 * 4 * net.activations(0.25)
    profile = Profile(start=1.0, per_mac=2.0, per_byte=3.0, batch=8)
    assert profile.seconds(net, 0.25) == pytest.approx(1.0 + 2 * macs + 3 * size)
    rates = np.linspace(0, 0.5, 5)
    assert (np.diff([profile.seconds(net, float(rate)) for rate in rates]) < 0).all()


def test_too_few_times_are_refused():
    with pytest.raises(ValueError, match="three timed steps or more, got 2"):
        fit([(1.0, 1.0), (2.0, 2.0)], [1.0, 2.0], batch=1)
