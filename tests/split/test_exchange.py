import inspect

import pytest

from pliant.split import adasplit, aux_split, one_shot, splitfed, vanilla


@pytest.mark.parametrize("method", [adasplit, aux_split, one_shot, splitfed, vanilla])
def test_methods_act_only_through_their_round_which_charges_all_that_it_does(method):
    source = inspect.getsource(method)
    assert ".clients[" not in source
    assert ".clients.values" not in source
    assert "._charged" not in source
