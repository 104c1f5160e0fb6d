import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pliant.deploy.squeeze import Bytes, Half, Largest, Plain, restored, squeezed

numbers = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=20)


def like(params):
    return {name: (tensor.shape, tensor.dtype) for name, tensor in params.items()}


def back(params, how, residual=None):
    sent, left = squeezed(params, how, residual or {})
    return restored(sent, how, like(params)), left


def test_plain_is_the_same_object():
    change = {"weight": torch.ones(3)}
    assert squeezed(change, Plain(), {})[0] is change


@pytest.mark.parametrize("how", [Half(), Bytes(), Largest(0.25)])
@given(values=numbers)
def test_what_is_sent_and_what_is_left_make_the_change(how, values):
    change = {"weight": torch.tensor(values)}
    got, left = back(change, how)
    assert torch.allclose(got["weight"] + left["weight"], change["weight"], rtol=1e-6, atol=1e-5)


def test_the_largest_entries_travel_with_their_places():
    change = {"weight": torch.tensor([[0.0, 3.0], [-5.0, 1.0]])}
    sent, left = squeezed(change, Largest(0.5), {})
    assert sent["weight:index"].tolist() == [1, 2]
    assert sent["weight:value"].tolist() == [3.0, -5.0]
    assert left["weight"].tolist() == [[0.0, 0.0], [0.0, 1.0]]


def test_what_was_left_out_is_sent_when_it_has_grown():
    change = {"weight": torch.tensor([2.0, 1.5])}
    _, left = squeezed(change, Largest(0.5), {})
    sent, _ = squeezed(change, Largest(0.5), left)
    assert sent["weight:index"].tolist() == [1]
    assert sent["weight:value"].tolist() == [3.0]


def test_bytes_are_within_half_a_step():
    change = {"weight": torch.linspace(-1.27, 1.27, 100)}
    got, _ = back(change, Bytes())
    assert float((got["weight"] - change["weight"]).abs().max()) <= 0.005001


def test_integers_travel_as_they_are():
    change = {"count": torch.tensor(7), "weight": torch.ones(2)}
    got, left = back(change, Bytes())
    assert int(got["count"]) == 7
    assert "count" not in left


def test_zeros_stay_zeros():
    got, _ = back({"weight": torch.zeros(4)}, Bytes())
    assert got["weight"].tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("how", "name", "value"),
    [
        (Half(), "weight", torch.zeros(3)),
        (Half(), "weight", torch.zeros(4, dtype=torch.float16)),
        (Bytes(), "weight:int8", torch.zeros(4, dtype=torch.int8)),
        (Bytes(), "weight:scale", torch.zeros(2)),
        (Largest(), "weight:index", torch.tensor([9])),
        (Largest(), "weight:index", torch.tensor([-1])),
        (Largest(), "weight:value", torch.zeros(2)),
    ],
)
def test_a_malformed_update_is_refused(how, name, value):
    change = {"weight": torch.ones(3)}
    sent, _ = squeezed(change, how, {})
    with pytest.raises(ValueError, match="weight"):
        restored({**sent, name: value}, how, like(change))


def test_a_place_that_comes_twice_is_refused():
    sent = {"weight:index": torch.tensor([1, 1]), "weight:value": torch.ones(2)}
    with pytest.raises(ValueError, match="each place once"):
        restored(sent, Largest(), {"weight": (torch.Size([3]), torch.float32)})


def test_a_half_of_an_update_is_refused():
    with pytest.raises(LookupError):
        restored(
            {"weight:int8": torch.zeros(3, dtype=torch.int8)},
            Bytes(),
            {"weight": (torch.Size([3]), torch.float32)},
        )
