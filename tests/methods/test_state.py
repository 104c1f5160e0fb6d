from dataclasses import dataclass, field, make_dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from pliant.methods import FedAvg, LocalTraining
from pliant.methods.base import ServerState
from pliant.methods.state import build_state, flatten_state, init_device_state, init_server_state
from pliant.params import Params

PARAMS = {"conv.weight": torch.arange(6.0).reshape(2, 3), "norm/mean": torch.tensor(4)}
BAD_TYPES = {
    "bool": bool,
    "str": str,
    "dict[str, torch.Tensor] | None": Params | None,
    "tuple[int, ...]": tuple[int, ...],
    "list[torch.Tensor]": list[Tensor],
    "dict[float, torch.Tensor]": dict[float, Tensor],
    "dict[str, dict[int, torch.Tensor]]": dict[str, dict[int, Tensor]],
    "dict": dict,
}


@dataclass(frozen=True)
class Memory:
    """A state with a field of every kind."""

    named: Params
    numbered: dict[int, Tensor]
    groups: dict[str, Params]
    by_round: dict[int, Params]
    mean: Tensor
    count: int
    best: float
    version: ClassVar[str] = "not a field"


@dataclass(frozen=True)
class OneDict:
    variate: Params = field(default_factory=dict)


class Stateful:
    """A method with these states."""

    local = LocalTraining()

    def __init__(self, server, device):
        self.init_state = lambda params: server
        self.init_device_state = lambda params: device


def make_memory():
    rounds = {3: {"a": torch.ones(1), "b/c": torch.zeros(2)}, 12: PARAMS}
    mean = torch.tensor([[0.1, torch.nan]], dtype=torch.float64)
    return Memory(PARAMS, {-1: mean, 40: mean}, {"x": PARAMS}, rounds, mean, 2**62 + 1, 0.1)


def test_every_kind_of_field_is_rebuilt_exactly():
    memory, again = make_memory(), build_state(Memory, flatten_state(make_memory()))
    assert repr(again) == repr(memory)  # types of keys and numbers included
    assert (again.count, again.best) == (2**62 + 1, 0.1)
    names = {"mean", "count", "best", "numbered/-1", "by_round/3/b/c", "groups/x/norm/mean"}
    assert names < flatten_state(memory).keys()


def test_a_single_dictionary_is_stored_under_its_own_names():
    assert flatten_state(OneDict(PARAMS)).keys() == PARAMS.keys()
    assert repr(build_state(OneDict, PARAMS)) == repr(OneDict(PARAMS))
    assert flatten_state(ServerState(PARAMS)).keys() == {f"params/{name}" for name in PARAMS}
    assert flatten_state(None) == {}


@pytest.mark.parametrize("text", BAD_TYPES)
def test_a_field_that_cannot_be_saved_is_refused_by_name(text):
    fields = [("params", Params), ("odd", BAD_TYPES[text])]
    bad = make_dataclass("Bad", fields, frozen=True)(PARAMS, None)
    for init, method in [
        (init_server_state, Stateful(bad, None)),
        (init_device_state, Stateful(ServerState(PARAMS), bad)),
    ]:
        with pytest.raises(ValueError, match="expected a Tensor, an int") as caught:
            init(method, PARAMS)
        assert str(caught.value).startswith("Bad.odd: ")
        assert str(caught.value).endswith(f", got {text}")


def test_what_is_no_state_is_refused():
    with pytest.raises(ValueError, match="a dataclass as the state of a method, got dict"):
        init_server_state(Stateful(PARAMS, None), PARAMS)
    with pytest.raises(ValueError, match="a dataclass as the state of a method, got dict"):
        init_device_state(Stateful(ServerState(PARAMS), PARAMS), PARAMS)
    with pytest.raises(ValueError, match="OneDict: expected a field `params`, found none"):
        init_server_state(Stateful(OneDict(), None), PARAMS)
    unknown = make_dataclass("Unknown", [("params", "Missing")])
    with pytest.raises(ValueError, match="Unknown: expected known types, got name 'Missing'"):
        init_server_state(Stateful(unknown(PARAMS), None), PARAMS)


def test_a_missing_tensor_is_named():
    tensors = flatten_state(make_memory())
    del tensors["count"]
    with pytest.raises(ValueError, match="Memory: expected a saved tensor `count`, found none"):
        build_state(Memory, tensors)


def test_a_fraction_is_not_stored_as_an_int():
    counted = make_dataclass("Counted", [("count", int)])
    with pytest.raises(TypeError, match="float"):
        flatten_state(counted(1.5))


def test_a_method_without_states_keeps_the_network_only():
    assert init_server_state(FedAvg(), PARAMS).params is PARAMS
    assert init_device_state(FedAvg(), PARAMS) is None
