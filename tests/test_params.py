import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pliant.params import (
    clone,
    digest,
    flatten,
    get_params,
    group_subtrees,
    is_finite,
    nbytes,
    normalise_weights,
    select_subtree,
    subtract,
    weighted_sum,
)

LEFT = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)}
RIGHT = {"a": torch.tensor([0.5, 4.0]), "b": torch.tensor(1.0)}


def test_a_difference_is_taken_name_by_name():
    difference = subtract(LEFT, RIGHT)
    assert difference["a"].tolist() == [0.5, -2.0]
    assert difference["b"].item() == 2.0


def test_a_weighted_sum_matches_a_hand_computation():
    total = weighted_sum([(0.25, LEFT), (0.75, RIGHT)])
    assert total["a"].tolist() == [0.625, 3.5]
    assert total["b"].item() == 1.5


def test_a_weighted_sum_is_in_double_precision():
    tiny = {"a": torch.tensor([2.0**-30])}
    total = weighted_sum([(1.0, {"a": torch.ones(1)}), (1.0, tiny)])
    assert total["a"].item() == 1.0 + 2.0**-30


def test_a_weighted_sum_does_not_change_its_terms():
    term = {"a": torch.ones(2, dtype=torch.float64)}
    weighted_sum([(1.0, term), (2.0, term)])
    assert term["a"].tolist() == [1.0, 1.0]


integer_weights = st.lists(st.integers(0, 2**40), min_size=1, max_size=8).filter(any)


@given(integer_weights, st.integers(-30, 30))
def test_normalised_weights_do_not_depend_on_the_unit(weights, power):
    scaled = [weight * 2.0**power for weight in weights]
    assert normalise_weights(scaled) == normalise_weights([float(weight) for weight in weights])


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8))
def test_normalised_weights_are_the_nearest_floats_to_the_exact_ones(weights):
    total = sum(Fraction(weight) for weight in weights)
    assert normalise_weights(weights) == [float(Fraction(weight) / total) for weight in weights]


def test_equal_weights_become_equal_shares():
    assert normalise_weights([0.1, 0.1, 0.1]) == normalise_weights([7.0, 7.0, 7.0]) == [1 / 3] * 3


@pytest.mark.parametrize("wrong", [[], [0.0, 0.0], [1.0, -0.5], [math.nan], [math.inf, 1.0]])
def test_invalid_weights_are_refused(wrong):
    with pytest.raises(ValueError, match="Expected weights >= 0 with a positive sum, got"):
        normalise_weights(wrong)


def test_a_digest_does_not_depend_on_the_order_of_names_or_on_strides():
    swapped = {"b": LEFT["b"], "a": LEFT["a"]}
    assert digest(swapped) == digest(LEFT)
    table = torch.arange(6.0).reshape(2, 3)
    assert digest({"a": table.T.contiguous().T}) == digest({"a": table})


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.tensor([1.0, 2.0000002]), "b": torch.tensor(3.0)},
        {"a": torch.tensor([1.0, 2.0]), "c": torch.tensor(3.0)},
        {"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor(3.0)},
        {"a": torch.tensor([1.0, 2.0]).view(torch.int32), "b": torch.tensor(3.0)},
        {"a": torch.tensor([1.0, 2.0])},
    ],
    ids=["one bit", "name", "shape", "type", "one fewer"],
)
def test_a_digest_changes_with(other):
    assert digest(other) != digest(LEFT)


@given(st.integers(0, 2), st.integers(0, 31))
def test_every_bit_changes_the_digest(index, bit):
    plain = torch.tensor([0.0, 1.0, -2.5])
    changed = plain.clone()
    changed.view(torch.int32)[index] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert digest({"a": changed}) != digest({"a": plain})


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_every_type_and_an_empty_tensor_have_a_digest(kind):
    ones, none = torch.ones(3, dtype=kind), torch.ones(0, dtype=kind)
    assert digest({"a": ones}) != digest({"a": none})


def test_bytes_are_counted():
    assert nbytes({"a": torch.zeros(3, 2), "n": torch.zeros(5, dtype=torch.int64)}) == 24 + 40


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_detected(wrong):
    assert is_finite(LEFT | {"n": torch.tensor(7)})
    assert not is_finite(LEFT | {"c": torch.tensor([0.0, wrong])})


def test_copies_do_not_follow_the_network():
    net = torch.nn.BatchNorm1d(2)
    params = get_params(net)
    copied = clone(params)
    assert set(params) == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    with torch.no_grad():
        net.weight.fill_(9.0)
        params["bias"].fill_(9.0)
    assert params["weight"].tolist() == [1.0, 1.0]
    assert copied["bias"].tolist() == [0.0, 0.0]
    assert not params["weight"].requires_grad


def test_nested_dictionaries_are_flattened_by_hand():
    a, b, c, d = (torch.tensor(float(number)) for number in range(4))
    flat = flatten({"x": {"w": a, "deep": {"w": b}}, 7: {"w": c}, "empty": {}, "leaf": d})
    assert flat.keys() == {"x/w", "x/deep/w", "7/w", "leaf"}
    assert flat["x/w"] is a
    assert flat["x/deep/w"] is b
    assert flat["7/w"] is c
    assert flat["leaf"] is d


def test_a_subtree_is_selected_by_its_whole_key():
    tensors = [torch.tensor(float(number)) for number in range(5)]
    flat = dict(zip(["a/w", "a/b/w", "ab/w", "b/a/w", "a"], tensors, strict=True))
    assert select_subtree(flat, "a") == {"w": tensors[0], "b/w": tensors[1]}
    assert select_subtree(flat, "a/b") == {"w": tensors[1]}
    assert select_subtree(flat, "c") == {}


KEYS = st.text("ab.1", min_size=1, max_size=3)
NAMES = st.text("ab./", min_size=1, max_size=4)
LEAVES = st.integers(0, 9).map(torch.tensor)


@given(st.dictionaries(KEYS, st.dictionaries(NAMES, LEAVES, min_size=1), max_size=4))
def test_groups_of_tensors_survive_flattening(groups):
    flat = flatten(groups)
    assert len(flat) == sum(map(len, groups.values()))
    assert group_subtrees(flat) == groups
    assert {key: select_subtree(flat, key) for key in groups} == groups


LEVEL = st.dictionaries(NAMES, LEAVES, min_size=1, max_size=3)


@given(st.dictionaries(KEYS, st.dictionaries(KEYS, LEVEL, max_size=3), max_size=3))
def test_deeper_trees_come_back_level_by_level(tree):
    flat = flatten(tree)
    assert {key: group_subtrees(select_subtree(flat, key)) for key in tree} == tree
