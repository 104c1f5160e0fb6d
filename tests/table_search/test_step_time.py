import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pliant.nn.elastic import elastic
from pliant.nn.models import digits_cnn
from pliant.table_search.step_time import (
    StepTimeModel,
    compute_relative_errors,
    count_step_work,
    fit_step_time_model,
)

PRICE = st.floats(1e-3, 10.0)


@given(start=PRICE, per_mac=PRICE, per_byte=PRICE)
def test_a_fit_without_noise_predicts_the_times_that_it_was_given(start, per_mac, per_byte):
    amounts = [(float(i * i), float(i)) for i in range(1, 9)]
    seconds = [start + per_mac * macs + per_byte * size for macs, size in amounts]
    model = fit_step_time_model(amounts, seconds, batch=4)
    fitted = [model.start + model.per_mac * macs + model.per_byte * size for macs, size in amounts]
    assert fitted == pytest.approx(seconds, rel=1e-6)
    doubled = [2 * time for time in fitted]  # the prediction is half of it
    assert compute_relative_errors(model, amounts, doubled) == pytest.approx(0.5)


def test_no_constant_is_negative():
    amounts = [(1.0, 9.0), (2.0, 5.0), (3.0, 1.0), (4.0, 0.5)]
    model = fit_step_time_model(amounts, [1.0, 2.0, 3.0, 4.0], batch=1)
    assert min(model.start, model.per_mac, model.per_byte) >= 0
    assert model.per_mac == pytest.approx(1.0)


def test_time_is_the_sum_of_its_parts():
    net = elastic(digits_cnn(), torch.zeros(1, 1, 28, 28))
    macs, size = count_step_work(net, 0.25, batch=8)
    assert macs == 8 * net.macs(0.25, training=True)
    assert size == 8 * 4 * net.count_activations(0.25)
    profile = StepTimeModel(start=1.0, per_mac=2.0, per_byte=3.0, batch=8)
    assert profile.predict_seconds(net, 0.25) == pytest.approx(1.0 + 2 * macs + 3 * size)
    rates = np.linspace(0, 0.5, 5)
    assert (np.diff([profile.predict_seconds(net, float(rate)) for rate in rates]) < 0).all()


def test_too_few_times_are_refused():
    with pytest.raises(ValueError, match="at least three timed steps, got 2"):
        fit_step_time_model([(1.0, 1.0), (2.0, 2.0)], [1.0, 2.0], batch=1)
