import pytest

from pliant.data import load
from pliant.data.catalogue import SOURCES
from pliant.data.published import SETS


def test_a_source_is_loaded_by_its_name():
    assert len(load("digits").train) == 8000
    with pytest.raises(LookupError, match=r"expected one of digits, .*, got imagenet"):
        load("imagenet")


def test_what_can_be_got_can_be_loaded_under_the_same_name():
    assert set(SOURCES) == {"digits", *(one.name for one in SETS)}
