import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pliant.compression import (
    Float16,
    Int8,
    TopK,
    Uncompressed,
    compress,
    count_encoded_bytes,
    decompress,
)
from pliant.params import nbytes

numbers = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=20)


def make_specs(params):
    return {name: (tensor.shape, tensor.dtype) for name, tensor in params.items()}


def send(delta, compression):
    """Return the decoded delta and the residual."""
    encoded, residual = compress(delta, compression, {})
    return decompress(encoded, compression, make_specs(delta)), residual


def test_an_uncompressed_delta_is_the_same_object():
    delta = {"weight": torch.ones(3)}
    assert compress(delta, Uncompressed(), {})[0] is delta


@pytest.mark.parametrize("compression", [Float16(), Int8(), TopK(0.25)])
@given(values=numbers)
def test_the_decoded_delta_and_the_residual_add_up_to_the_delta(compression, values):
    delta = {"weight": torch.tensor(values)}
    decoded, residual = send(delta, compression)
    total = decoded["weight"] + residual["weight"]
    assert torch.allclose(total, delta["weight"], rtol=1e-6, atol=1e-5)


def test_the_largest_entries_are_sent_with_their_indices():
    delta = {"weight": torch.tensor([[0.0, 3.0], [-5.0, 1.0]])}
    encoded, residual = compress(delta, TopK(0.5), {})
    assert encoded["weight:index"].tolist() == [1, 2]
    assert encoded["weight:value"].tolist() == [3.0, -5.0]
    assert residual["weight"].tolist() == [[0.0, 0.0], [0.0, 1.0]]


def test_the_residual_is_sent_once_it_is_large_enough():
    delta = {"weight": torch.tensor([2.0, 1.5])}
    _, residual = compress(delta, TopK(0.5), {})
    encoded, _ = compress(delta, TopK(0.5), residual)
    assert encoded["weight:index"].tolist() == [1]
    assert encoded["weight:value"].tolist() == [3.0]


def test_the_error_of_int8_is_at_most_half_a_step():
    delta = {"weight": torch.linspace(-1.27, 1.27, 100)}
    decoded, _ = send(delta, Int8())
    assert float((decoded["weight"] - delta["weight"]).abs().max()) <= 0.005001


def test_integers_are_sent_as_they_are():
    decoded, residual = send({"count": torch.tensor(7), "weight": torch.ones(2)}, Int8())
    assert int(decoded["count"]) == 7
    assert "count" not in residual


def test_zeros_stay_zeros():
    decoded, _ = send({"weight": torch.zeros(4)}, Int8())
    assert decoded["weight"].tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("compression", "name", "value"),
    [
        (Float16(), "weight", torch.zeros(3)),
        (Float16(), "weight", torch.zeros(4, dtype=torch.float16)),
        (Int8(), "weight:int8", torch.zeros(4, dtype=torch.int8)),
        (Int8(), "weight:scale", torch.zeros(2)),
        (TopK(), "weight:index", torch.tensor([9])),
        (TopK(), "weight:index", torch.tensor([-1])),
        (TopK(), "weight:value", torch.zeros(2)),
    ],
)
def test_a_malformed_delta_is_rejected(compression, name, value):
    delta = {"weight": torch.ones(3)}
    encoded, _ = compress(delta, compression, {})
    with pytest.raises(ValueError, match="weight"):
        decompress({**encoded, name: value}, compression, make_specs(delta))


def test_a_duplicate_index_is_rejected():
    encoded = {"weight:index": torch.tensor([1, 1]), "weight:value": torch.ones(2)}
    with pytest.raises(ValueError, match="each index once"):
        decompress(encoded, TopK(), make_specs({"weight": torch.ones(3)}))


def test_a_delta_with_a_missing_part_is_rejected():
    encoded = {"weight:int8": torch.zeros(3, dtype=torch.int8)}
    with pytest.raises(LookupError):
        decompress(encoded, Int8(), make_specs({"weight": torch.ones(3)}))


@given(
    size=st.integers(0, 50),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.int64]),
    compression=st.sampled_from([Uncompressed(), Float16(), Int8(), TopK(0.01), TopK(0.3), TopK()]),
)
def test_the_encoded_size_is_known_before_there_is_a_delta(size, dtype, compression):
    encoded, _ = compress({"weight": torch.ones(size, dtype=dtype)}, compression, {})
    assert nbytes(encoded) == count_encoded_bytes(size, dtype, compression)


@pytest.mark.parametrize("compression", [Float16(), Int8(), TopK(0.5)])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_delta_that_is_not_finite_is_not_repaired(compression, value):
    decoded, _ = send({"weight": torch.tensor([1.0, value, 2.0])}, compression)
    assert not decoded["weight"].isfinite().all()
