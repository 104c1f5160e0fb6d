import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors.numpy
import torch

from pliant.nn.elastic import elastic
from pliant.nn.models import densenet100, digits_cnn
from pliant.nn.pareto_table import (
    ParetoTable,
    describe_layers,
    linear_table,
    resolve_table,
    uniform_table,
)
from pliant.nn.table_file import load_table, read_provenance, save_table
from pliant.rng import rng_stream
from pliant.table_search.search_space import round_rates

SMALL = ParetoTable("net", ((0.5,), (0.25,), (0.0,)), (0.3, 0.6, 1.0), (0.1, 0.2, 0.2))


@pytest.fixture(scope="module")
def net():
    return elastic(digits_cnn(), torch.zeros(1, 1, 28, 28))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shares": (0.3, 0.2, 1.0)}, "rising cost, got a lower one in row 1"),
        ({"gains": (0.1, 0.3, 0.2)}, "rising gain, got a lower one in row 2"),
        ({"seconds": (3.0, 2.0, 4.0)}, "rising time"),
        ({"rates": ((0.5,), (1.25,), (0.0,))}, "rates in"),
        ({"gains": (0.1,)}, "Expected 3 values of gain"),
        ({"sides": (16, 24)}, "Expected 3 values of side, got 2"),
        ({"batch_shares": (0.5,)}, "Expected 3 values of batch share, got 1"),
        ({"batch_shares": (0.5, 0.0, 1.0)}, "> 0.0"),
        ({"sides": (0, 16, None)}, ">= 1"),
        ({"stages": (0.5, 0.0, 0.5)}, "order of their stages"),
        ({"stages": (0.0, 0.0, 0.5), "shares": (0.3, 0.2, 0.1)}, "rising cost, .* in row 1"),
    ],
)
def test_a_table_that_is_not_monotone_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        msgspec.structs.replace(SMALL, **change)


@pytest.mark.parametrize("rows", [5, 64])  # 64 equal steps are finer than float32
def test_a_table_survives_a_file(tmp_path, net, rows):
    table = uniform_table(net, rows=rows)
    path = save_table(tmp_path / "table.safetensors", table, {"by": "hand"})
    assert load_table(path) == table
    assert read_provenance(path) == {"by": "hand"}


def test_linear_rates_rise_with_depth_and_cost_what_they_say(net):
    table, sites = linear_table(net, rows=4, highest_rate=0.6), len(net.sites)
    for row, last in zip(table.rates, (0.6, 0.4, 0.2, 0.0), strict=True):
        assert row == pytest.approx([last * (site + 1) / sites for site in range(sites)])
    full = net.macs(net.full, training=True)
    draws = [net.draw(table.rates[0], rng_stream(0, "draw", n)) for n in range(300)]
    mean = sum(net.macs(subnet, training=True) for subnet in draws) / len(draws)
    assert table.shares[0] == pytest.approx(mean / full, rel=0.05)
    assert table.shares[-1] == 1.0


STAGED = msgspec.structs.replace(
    SMALL,
    rates=((0.5,), (0.0,), (0.25,), (0.0,)),
    shares=(0.1, 0.5, 0.2, 1.0),
    gains=(0.3, 0.4, -0.1, 0.0),
    sides=(16, 24, 16, None),
    batch_shares=(0.5, 1.0, 1.0, 1.0),
    stages=(0.0, 0.0, 0.4, 0.4),
)


def test_a_table_of_stages_survives_a_file(tmp_path):
    path = save_table(tmp_path / "table.safetensors", STAGED)
    assert load_table(path) == STAGED
    first, second = STAGED.split_stages()
    assert (first.rates, first.sides, set(first.stages)) == (((0.5,), (0.0,)), (16, 24), {0.0})
    assert (second.gains, second.batch_shares) == ((-0.1, 0.0), (1.0, 1.0))
    assert SMALL.split_stages() == [SMALL]
    assert STAGED.get_scale(0) == (16, 0.5)
    assert SMALL.get_scale(0) == (None, 1.0)


def test_a_table_of_format_2_has_full_images_and_mini_batches(net):
    table = load_table(Path(__file__).with_name("table_of_format_2.safetensors"))
    assert table == uniform_table(net, rows=3)
    assert {table.get_scale(row) for row in range(3)} == {(None, 1.0)}


def rewrite(path, change):
    """Change the tensors and the header of a table file."""
    raw = path.read_bytes()
    tensors = safetensors.numpy.load(raw)
    size = int.from_bytes(raw[:8], "little")
    header = msgspec.json.decode(msgspec.json.decode(raw[8 : 8 + size])["__metadata__"]["table"])
    change(tensors, header)
    metadata = {"table": msgspec.json.encode(header).decode()}
    path.write_bytes(safetensors.numpy.save(tensors, metadata))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _, header: header.update(format=4), "format 3, got format 4 of a newer pliant"),
        (
            lambda tensors, _: tensors.update(sides=np.array([8])),
            "Expected 4 values of side, got 1",
        ),
        (lambda tensors, _: tensors.update(sides=np.full(4, -8)), ">= 1"),
        (lambda tensors, _: tensors.update(stages=np.full(4, 7.0)), "<= 1.0"),
        (lambda tensors, _: tensors.update(batch_shares=np.zeros(4)), "> 0.0"),
        (lambda tensors, _: tensors.pop("rates"), "found no 'rates'"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path, change, message):
    path = save_table(tmp_path / "table.safetensors", STAGED)
    rewrite(path, change)
    with pytest.raises(ValueError, match=rf"table\.safetensors: .*{message}") as error:
        load_table(path)
    assert "\n" not in str(error.value)


def test_a_file_edited_to_be_non_monotone_is_refused(tmp_path):
    path = save_table(tmp_path / "table.safetensors", SMALL)
    rewrite(path, lambda tensors, _: tensors["gains"].put(0, 0.9))
    with pytest.raises(ValueError, match=r"table.safetensors: Expected rows of rising gain"):
        load_table(path)


@pytest.mark.parametrize("length", [0, 5, 100, -1])
def test_the_error_for_a_truncated_file_names_it(tmp_path, length):
    path = save_table(tmp_path / "table.safetensors", SMALL)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"table\.safetensors: "):
        load_table(path)


def test_the_error_for_another_network_names_the_layer_that_differs(net):
    other = elastic(digits_cnn(filters=(12, 20)), torch.zeros(1, 1, 28, 28))
    with pytest.raises(ValueError, match=r"features\.3 20x12x5x5 .* here, features\.3 24x12x5x5"):
        resolve_table(uniform_table(net), other)


def test_the_same_network_at_another_image_size_is_refused(net):
    other = elastic(digits_cnn(side=32), torch.zeros(1, 1, 32, 32))
    with pytest.raises(ValueError, match=r"features\.0 12x1x5x5 \(\d+\) here"):
        uniform_table(net).check_network(other)


def test_sixty_four_rows_of_densenet_100_stay_under_30_kb(tmp_path):
    net = elastic(densenet100(), torch.zeros(1, 3, 32, 32), check=False)
    assert len(net.sites) == 99
    vectors = round_rates(np.random.default_rng(0).uniform(0, 0.5, (64, 99)))
    shares = tuple(np.linspace(0.3, 1.0, 64).tolist())
    rates = tuple(map(tuple, vectors.tolist()))
    table = ParetoTable(net.fingerprint, rates, shares, shares, shares, describe_layers(net), 1e9)
    path = save_table(tmp_path / "table.safetensors", table, {"search": "x" * 900})
    assert path.stat().st_size < 30_000
    assert load_table(path) == table


def test_equal_rates_rise_in_cost_to_the_full_network(net):
    table = uniform_table(net)
    assert all(before < after for before, after in pairwise(table.shares))
    assert table.shares[-1] == 1.0
    assert resolve_table(None, net) == table
    assert resolve_table(None, net) is resolve_table(None, net), "cached"


def test_a_table_is_read_without_pymoo_or_matplotlib(tmp_path):
    save_table(tmp_path / "table.safetensors", SMALL)
    code = (
        "import sys; from pathlib import Path; from pliant import load_table;"
        f"load_table(Path({str(tmp_path / 'table.safetensors')!r}));"
        "print(sorted({'pymoo', 'matplotlib'} & set(sys.modules)))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "[]"
