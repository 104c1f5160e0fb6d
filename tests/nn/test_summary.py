"""The summary of a network: sites, costs and dense fallbacks."""

import warnings

import pytest
import torch
from tests.nn.zoo import ZOO
from torch import Tensor, nn

from pliant.nn.elastic import elastic
from pliant.nn.models import densenet_bc, resnet20


def test_the_table_has_a_row_for_each_site_and_the_cost_at_three_rates() -> None:
    net = elastic(*ZOO["dense"]())
    head, *rows, full, quarter, half, kept, dense = net.summary().splitlines()
    assert head.split() == ["site", "filters", "MACs", "layers", "(read", "by)"]
    assert [row.split(maxsplit=3) for row in rows] == [
        ["0", "4", "6,912", "stem (layers.0, transition)"],
        ["1", "3", "6,912", "layers.0 (transition)"],
        ["2", "5", "2,240", "transition (layers.1, head)"],
        ["3", "3", "2,160", "layers.1 (head)"],
    ]
    assert full == "MACs per sample at rate 0.0: 18,248 (1.000)"
    for line, rate in ((quarter, 0.25), (half, 0.5)):
        share = net.macs(rate) / 18_248
        assert line == f"MACs per sample at rate {rate}: {net.macs(rate):,.0f} ({share:.3f})"
    assert kept == "full: head: its channels reach the output"
    assert dense == "no value had to be made dense"


def test_every_layer_is_in_a_site_or_explained() -> None:
    for name, make in ZOO.items():
        module, x = make()
        net = elastic(module, x)
        layers = {
            path
            for path, layer in module.named_modules()
            if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear)
        }
        sites = {layer for site in net.sites for layer in site.layers}
        assert sites.isdisjoint(net.full_layers), name
        assert layers <= sites | net.full_layers.keys(), name
        assert all(net.full_layers.values())


def test_hidden_linear_layers_and_layers_of_the_output_are_told_apart() -> None:
    module, x = ZOO["plain"]()
    layers = elastic(module, x).full_layers
    assert layers["head.1"] == "a linear layer is a site only with hidden=True"
    assert layers["head.3"] == "its channels reach the output"
    assert "head.1" not in elastic(module, x, hidden=True).full_layers


def test_coupled_layers_share_a_row() -> None:
    text = elastic(*ZOO["projected_residual"]()).summary()
    assert "body.1, shortcut.0, second.1 (second.0.0, head)" in text


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("unknown", "dense: relu for cumsum: cumsum mixes channels in a way no rule covers"),
    ],
)
def test_it_reports_where_and_why_a_value_was_made_dense(name: str, line: str) -> None:
    net = elastic(*ZOO[name]())
    assert line in net.summary()
    where, _, why = line.removeprefix("dense: ").partition(": ")
    value, _, reader = where.partition(" for ")
    assert any(
        (fallback.value, fallback.reader) == (value, reader) and fallback.reason.startswith(why)
        for fallback in net.dense_fallbacks
    )


def group_by_torch_pruning(module: nn.Module, x: Tensor) -> set[frozenset[str]]:
    """Group convolutions that must lose output channels together, with an independent library."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch_pruning

        graph = torch_pruning.DependencyGraph().build_dependency(module, example_inputs=x)
        names = {submodule: name for name, submodule in module.named_modules()}
        groups = set()
        for layer in names:
            if isinstance(layer, nn.Conv2d):
                prune = torch_pruning.prune_conv_out_channels
                group = [
                    (item.dep.target.module, item.dep.handler)
                    for item in graph.get_pruning_group(layer, prune, idxs=[0])
                ]
                groups.add(
                    frozenset(
                        names[submodule]
                        for submodule, handler in group
                        if isinstance(submodule, nn.Conv2d)
                        and graph.is_out_channel_pruning_fn(handler)
                    )
                )
    return groups


@pytest.mark.parametrize(
    ("module", "count"), [(resnet20(), 12), (densenet_bc(depth=22), 21)], ids=["resnet", "densenet"]
)
def test_layers_are_coupled_as_in_torch_pruning(module: nn.Module, count: int) -> None:
    x = torch.zeros(1, 3, 32, 32)
    ours = {frozenset(site.layers) for site in elastic(module, x).sites}
    assert len(ours) == count
    assert ours == group_by_torch_pruning(module, x)
