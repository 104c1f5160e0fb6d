import json

import pytest
import torch

from pliant import cli
from pliant.bench import elastic_limits
from pliant.bench.elastic_families import FAMILIES, INNER_LIMIT, measure_macs
from pliant.bench.elastic_limits import SMALL_NETWORKS, make_resnet152, measure_check
from pliant.bench.timing import Measurement
from pliant.nn.elastic import elastic


def test_resnet_152_has_the_parameters_of_the_paper():
    with torch.device("meta"):
        net = make_resnet152()
    assert sum(tensor.numel() for tensor in net.parameters()) == 60_192_808


@pytest.mark.parametrize("name", SMALL_NETWORKS)
def test_a_small_network_is_checked_and_measured(name):
    make, shape = SMALL_NETWORKS[name]
    net = make()
    assert elastic(net, torch.randn(2, *shape)).sizes
    assert min(measure_check(net, torch.randn(2, *shape))) > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_half_of_the_filters_cost_at_most_what_the_table_says(name):
    family = FAMILIES[name]
    net = elastic(family.make(), torch.randn(2, *family.shape))
    assert not net.dense_fallbacks
    assert measure_macs(net) <= family.macs_limit
    if name == "vit_small":
        assert measure_macs(net, keeps_width=True) <= INNER_LIMIT


@pytest.mark.parametrize(("value", "code"), [(1.0, 0), (1.2, 1)])
def test_a_ratio_over_its_limit_is_an_exit_code(value, code, monkeypatch, capsys):
    monkeypatch.setattr(
        elastic_limits, "measure_limits", lambda _: iter([Measurement("ratio", value, "", 1.1)])
    )
    assert cli.main(["bench", "elastic", "--limits", "--json"]) == code
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line)["is_met"] == (not code)
    assert cli.main(["bench", "elastic", "lenet", "--limits"]) == 2
