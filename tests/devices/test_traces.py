import numpy as np
import pytest

from pliant.devices import (
    ChangingTrace,
    ConstantTrace,
    Fleet,
    OnOffWindows,
    ProductTrace,
    SteppedTrace,
)
from pliant.value import decode, encode

CHARGING = OnOffWindows(windows=((0.0, 1.0), (3.0, 4.0)), period=4.0)


def test_a_device_works_only_while_charging():
    changing = ChangingTrace(per_round=2.0)
    product = Fleet(size=5, speed=ProductTrace((changing, CHARGING))).device(3)
    alone = Fleet(size=5, speed=changing).device(3)
    assert product.work(0.0, 8.0) == pytest.approx(
        alone.work(0.0, 1.0) + alone.work(3.0, 5.0) + alone.work(7.0, 8.0), rel=1e-12
    )
    assert product.speed(2.0) == 0.0
    assert product.speed(3.5) == alone.speed(3.5)


def test_the_factors_of_a_product_are_drawn_independently():
    speeds = ProductTrace((ConstantTrace(0.0, 1.0), ConstantTrace(0.0, 1.0)))
    work = Fleet(size=20_000, speed=speeds).compute_speeds(np.arange(20_000), 0.0, 1.0).total
    assert work.mean() == pytest.approx(0.25, abs=0.01)  # 1/3 if both were one draw


def test_products_may_be_nested_or_have_one_factor():
    inner = ProductTrace(
        (ConstantTrace(0.5), ProductTrace((CHARGING, SteppedTrace(times=(0.0,), speeds=(2.0,)))))
    )
    assert Fleet(size=1, speed=inner).device(0).work(0.0, 4.0) == 2.0
    assert Fleet(size=1, speed=ProductTrace((CHARGING,))).device(0).work(0.0, 4.0) == 2.0


def test_traces_are_read_from_plain_data():
    raw = {
        "size": 3,
        "speed": {
            "type": "product",
            "parts": [
                {"type": "changing", "low": 0.5, "per_round": 1},
                {"type": "windows", "windows": [[0, 1], [3, 4]], "period": 4},
            ],
        },
    }
    fleet = decode(raw, Fleet)
    assert fleet == Fleet(
        size=3, speed=ProductTrace((ChangingTrace(low=0.5, per_round=1.0), CHARGING))
    )
    assert decode(encode(fleet), Fleet) == fleet
    assert hash(fleet) == hash(decode(raw, Fleet))


@pytest.mark.parametrize(
    ("speed", "message"),
    [
        ({"type": "changes"}, "unknown `speed.type` = 'changes'; did you mean 'changing'"),
        ({"type": "constant", "low": -1}, r">= 0.0 at `speed.low`, got -1"),
        ({"type": "constant", "fast": 1}, "unknown key `speed.fast`"),
        ({"type": "product", "parts": []}, "length >= 1"),
        ({"type": "steps", "times": [1], "speeds": [1]}, "start at 0"),
    ],
)
def test_wrong_traces_are_rejected(speed, message):
    with pytest.raises(ValueError, match=message):
        decode({"size": 1, "speed": speed}, Fleet)
