"""Compile a network: trace it, then lower its graph until no decision is left to make."""

from dataclasses import dataclass

from torch import Tensor, fx, nn

from pliant.nn.compiler import dispatch
from pliant.nn.compiler.builder import Builder
from pliant.nn.compiler.coupling import Decisions, LayerGroup
from pliant.nn.compiler.program import CompactProgram, replace_nodes
from pliant.nn.compiler.trace import trace


@dataclass(frozen=True)
class CompiledNetwork:
    """A program, and the layers of its sites."""

    program: CompactProgram
    groups: tuple[LayerGroup, ...]  # one per site


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
            return CompiledNetwork(program, builder.groups)


def _lower_graph(builder: Builder, graph: fx.Graph) -> CompactProgram:
    *nodes, output = graph.nodes
    for node in nodes:
        dispatch.lower_node(builder, node)
    for source in output.all_input_nodes:
        if (layout := builder.layout(source)) is not None:
            builder.fix(layout.spans)
    return builder.finish(
        replace_nodes(
            output.args[0], lambda source: builder.densify(source, "output", "it is the output")
        )
    )
