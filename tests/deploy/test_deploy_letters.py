import pytest
import torch

from pliant.deploy.letters import Answer, BadLetter, Order, packed, read_answer, read_order
from pliant.deploy.squeeze import Largest


def test_an_order_comes_as_it_went():
    order = Order("train", {"a": [1, 2]}, 3, 7, 0.1, row=2, macs=5.0, squeeze=Largest(0.2))
    head, groups = read_order(packed(order, {"params": {"a.weight": torch.arange(3.0)}}))
    assert head == order
    assert groups["params"]["a.weight"].tolist() == [0.0, 1.0, 2.0]


def test_an_answer_comes_as_it_went():
    answer = Answer("update", 3, 7, rows=(1, 2), times=(0.0, 0.5, 1.0), curve=((0.5, 0.1),))
    assert read_answer(packed(answer))[0] == answer


@pytest.mark.parametrize("size", [0, 1, 39, 40, 41, 100])
def test_a_letter_that_is_cut_is_no_letter(size):
    raw = packed(Answer("update", 3), {"change": {"weight": torch.ones(100)}})
    with pytest.raises(BadLetter):
        read_answer(raw[:size])


def test_a_letter_of_which_any_byte_is_changed_is_no_letter():
    raw = packed(Answer("update", 3), {"change": {"weight": torch.ones(4)}})
    for place in range(len(raw)):
        bad = raw[:place] + bytes([raw[place] ^ 255]) + raw[place + 1 :]
        with pytest.raises(BadLetter):
            read_answer(bad)


@pytest.mark.parametrize("head", [None, [], {"kind": "gift"}, {"kind": "update", "device": "one"}])
def test_a_head_of_another_form_is_refused(head):
    from pliant import checkpoint

    with pytest.raises(BadLetter):
        read_answer(checkpoint.to_bytes({}, head))
