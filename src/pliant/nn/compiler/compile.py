"""Compile a network: trace it, then lower its graph until no decision is left to make."""

import copy
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx, nn

from pliant.nn.compiler import dispatch
from pliant.nn.compiler.builder import Builder
from pliant.nn.compiler.channels import ChannelSpans
from pliant.nn.compiler.coupling import Decisions, LayerGroup
from pliant.nn.compiler.program import CompactProgram, replace_nodes
from pliant.nn.compiler.trace import BATCH, NotTraceable, trace


@dataclass(frozen=True)
class CompiledNetwork:
    """A program, and what it takes to compile the network the same way again."""

    program: CompactProgram
    groups: tuple[LayerGroup, ...]  # one per site
    candidates: dict[str, int]
    decisions: Decisions


def compile_network(
    net: nn.Module, example: tuple[Tensor, ...], *, coupled: bool, hidden: bool
) -> CompiledNetwork:
    """Compile a network for the shapes of an example."""
    graph = trace(net, example)
    decisions = Decisions(coupled)
    candidates = dispatch.find_candidates(Builder(net, {}, decisions), graph)
    while True:
        num_decisions = decisions.size()
        builder = Builder(net, candidates, decisions)
        program = _lower_graph(builder, graph)
        if decisions.size() == num_decisions and not hidden:
            for group in builder.groups:  # linear layers are sites only if coupled to convolutions
                if all(len(builder.shape(layer)) == 2 for layer in group.layers):
                    decisions.fixed.update(group.layers)
        if decisions.size() == num_decisions:
            return CompiledNetwork(program, builder.groups, candidates, decisions)


def recompile_network(
    net: nn.Module, example: tuple[Tensor, ...], original: CompiledNetwork, size: str
) -> CompiledNetwork:
    """Compile a network for another spatial size, with the original's sites and slicings."""
    try:
        graph = trace(net, example)
    except NotTraceable as error:
        raise ValueError(f"{error.path} cannot run at {size}: {_explain(net, error)}") from error
    candidates, decisions = original.candidates, copy.deepcopy(original.decisions)
    builder = Builder(net, candidates, decisions)
    compiled = CompiledNetwork(_lower_graph(builder, graph), builder.groups, candidates, decisions)
    difference = _find_difference(original, compiled)
    if difference:
        raise ValueError(f"{type(net).__name__} cannot run at {size}: {difference}")
    return compiled


def make_blank(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return an example of the same type and device that takes no memory."""
    return tensor.new_zeros(()).expand(1, *shape)


def _lower_graph(builder: Builder, graph: fx.Graph) -> CompactProgram:
    *nodes, output = graph.nodes
    for node in nodes:
        dispatch.lower_node(builder, node)
    for source in output.all_input_nodes:
        if (layout := builder.layout(source)) is not None:
            builder.fix(layout.spans)
        value = source.meta["value"]
        is_batch = isinstance(value, Tensor) and value.dim() > 0
        builder.program.output_rows.append(value.shape[0] / BATCH if is_batch else 0.0)
    return builder.finish(
        replace_nodes(
            output.args[0], lambda source: builder.densify(source, "output", "it is the output")
        )
    )


def _explain(net: nn.Module, error: NotTraceable) -> str:
    module: Any = dict(net.named_modules()).get(error.path)
    if isinstance(module, nn.Linear):
        return (
            f"the number of its {module.in_features} inputs depends on the size. Pool to a fixed "
            "size before it, as torch.nn.AdaptiveAvgPool2d does"
        )
    return error.problem


def _find_difference(original: CompiledNetwork, resized: CompiledNetwork) -> str:
    """Return what prevents a program from sharing parameters and subnets with the original."""
    before, after = original.program, resized.program
    if before.output_rows != after.output_rows:
        return (
            f"its output has {max(after.output_rows):g} rows per sample there, as a view has a "
            "fixed number of features"
        )
    for name in [*before.slicings, *after.slicings]:
        if (name in before.slicings) != (name in after.slicings):
            return f"{name} is used at one of the two sizes only"
        if before.slicings[name] != after.slicings[name]:
            return f"{name} reads other channels there"
    if original.decisions != resized.decisions or _list_fragile(before) != _list_fragile(after):
        return "its layers would have to share other masks there"
    return ""


def _list_fragile(program: CompactProgram) -> list[ChannelSpans]:
    # flattened pixels repeat channels as often as the size says
    return [tuple(replace(span, repeat=1) for span in spans) for spans in program.fragile_spans]
