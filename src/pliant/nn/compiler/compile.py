"""Compile a network: trace it, then lower its graph until no decision is left to make."""

import copy
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx, nn

from pliant.nn.compiler import dispatch
from pliant.nn.compiler.builder import Builder
from pliant.nn.compiler.channels import ChannelSpans
from pliant.nn.compiler.coupling import Candidate, Decisions, LayerGroup
from pliant.nn.compiler.full_layers import explain_full_layers
from pliant.nn.compiler.preserve import preserve
from pliant.nn.compiler.program import CompactProgram, replace_nodes
from pliant.nn.compiler.refusals import NotTraceable
from pliant.nn.compiler.trace import BATCH, TRACE_LOCK, trace


@dataclass(frozen=True)
class CompiledNetwork:
    """A program, and what it takes to compile the network the same way again."""

    program: CompactProgram
    groups: tuple[LayerGroup, ...]  # one per site
    candidates: dict[str, Candidate]
    decisions: Decisions
    modes: dict[str, bool]  # which modules are in training mode
    full_layers: dict[str, str]  # layers that keep all filters, and why


def compile_network(
    net: nn.Module, graph: fx.Graph, *, coupled: bool, hidden: bool
) -> CompiledNetwork:
    """Compile a traced network, with every module in its mode for training."""
    decisions = Decisions(coupled)
    candidates = dispatch.find_candidates(Builder(net, {}, decisions), graph)
    while True:
        num_decisions = decisions.size()
        builder = Builder(net, candidates, decisions)
        program = _lower_graph(builder, graph)
        if decisions.size() == num_decisions and not hidden:
            for group in builder.groups:  # of vectors, unless coupled to others
                if all(candidates[layer].is_flat for layer in group.layers):
                    reason = "a linear layer is a site only with hidden=True"
                    decisions.fixed.update(dict.fromkeys(group.layers, reason))
        if decisions.size() == num_decisions:
            modes = {path: module.training for path, module in net.named_modules()}
            full_layers = explain_full_layers(builder, graph)
            return CompiledNetwork(
                program, builder.groups, candidates, decisions, modes, full_layers
            )


def recompile_network(
    net: nn.Module, example: tuple[Tensor, ...], original: CompiledNetwork, size: str
) -> CompiledNetwork:
    """Compile a network for another spatial size, with the original's sites and slicings."""
    with TRACE_LOCK, preserve(net):
        for path, module in net.named_modules():
            module.training = original.modes[path]
        try:
            graph = trace(net, example)
        except NotTraceable as error:
            message = f"{error.path} cannot run at {size}: {_explain(net, error)}"
            raise ValueError(message) from error
        decisions = copy.deepcopy(original.decisions)
        builder = Builder(net, original.candidates, decisions)
        program = _lower_graph(builder, graph)
    compiled = replace(original, program=program, groups=builder.groups, decisions=decisions)
    difference = _find_difference(original, compiled)
    if difference:
        raise ValueError(f"{type(net).__name__} cannot run at {size}: {difference}")
    return compiled


def make_blank(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return an example of the same type and device that takes no memory."""
    return tensor.new_zeros(()).expand(1, *shape)


def _lower_graph(builder: Builder, graph: fx.Graph) -> CompactProgram:
    dispatch.slice_computed_weights(builder, graph)
    *nodes, output = graph.nodes
    for node in nodes:
        dispatch.lower_node(builder, node)
    for source in output.all_input_nodes:
        if (layout := builder.layout(source)) is not None:
            builder.fix(layout.spans, "its channels reach the output")
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
