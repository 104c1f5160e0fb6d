"""Build the compact program of a traced network.

Lowering may discover that layers must share a mask (their outputs are added), must keep all filters
(their channels reach the output), or must read all channels (a parameter is used in two ways). Such
a decision restarts the lowering. Decisions only accumulate, so this terminates.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from pliant.nn.compiler import channels
from pliant.nn.compiler.channels import ChannelLayout, ChannelSpan, ChannelSpans, SiteFilter
from pliant.nn.compiler.coupling import Candidate, Decisions, group_layers
from pliant.nn.compiler.graphs import find_canonical_names
from pliant.nn.compiler.in_place import find_overwritten_input, is_delayed_relu, is_view
from pliant.nn.compiler.program import (
    ActivationCost,
    BoundProgram,
    ChannelIndex,
    CompactProgram,
    DenseFallback,
    Env,
    Instruction,
    LayerCost,
    ParamSlicing,
    Shape,
    Slot,
    SubnetQuery,
    broadcast_shape,
    collect_slots,
    replace_nodes,
    resolve_slots,
    scatter_channels,
)
from pliant.nn.compiler.refusals import copy_module
from pliant.nn.compiler.trace import BATCH, find_callable

RunFn = Callable[[Env, BoundProgram], Any]
Slots = dict[fx.Node, int]
_VIEWS: set[Any] = {operator.getitem, "reshape", torch.reshape, "unsqueeze", torch.unsqueeze}
Layouts = ChannelLayout | Sequence[ChannelLayout | None] | None  # of a tensor or a tuple


class Builder:
    """One attempt at lowering a network, under the decisions so far."""

    def __init__(
        self, net: nn.Module, candidates: Mapping[str, Candidate], decisions: Decisions
    ) -> None:
        self.program = CompactProgram()
        self.modules = dict(net.named_modules())
        self.decisions = decisions
        self.groups = group_layers(candidates, decisions)
        self._sizes = [group.filters for group in self.groups]
        self.site_of_layer = {  # only of layers that may lose filters
            layer: site for site, group in enumerate(self.groups) for layer in group.layers
        }
        self._canonical_names = find_canonical_names(net)
        self._saved_names = net.state_dict().keys()
        self._net = net
        self._layouts: dict[fx.Node, Any] = {}
        self._slots: Slots = {}
        self._dense_slots: Slots = {}
        self.fused_runs: dict[fx.Node, RunFn] = {}  # of nodes that do the work of their input too
        self.weight_parts: dict[fx.Node, str] = {}  # what a layer's weight is computed from
        self._unsliced_names = frozenset(decisions.unsliced)  # decided in earlier attempts
        self._reads: list[tuple[int, ...]] = []
        self._varying_nodes: set[fx.Node] = set()  # depend on the input
        self._grad_nodes: set[fx.Node] = set()
        self._trainable_names = {
            name for name, tensor in net.named_parameters() if tensor.requires_grad
        }
        self._slicings: dict[ParamSlicing, ParamSlicing] = {}

    # lookups

    def layout(self, node: fx.Node) -> ChannelLayout | None:
        """Return a value's layout; None if all channels are present."""
        layout: ChannelLayout | None = self._layouts.get(node)
        return layout

    def layouts(self, node: fx.Node) -> list[ChannelLayout | None] | None:
        """Return the layouts of a tuple's parts; None for other values."""
        layouts = self._layouts.get(node)
        return layouts if isinstance(layouts, list) else None

    def is_constant(self, node: Any) -> bool:
        """Return whether a value is independent of the input."""
        return node not in self._varying_nodes

    def param_name(self, node: Any) -> str | None:
        """Return the name of the saved parameter or buffer that a node reads, if any."""
        if isinstance(node, fx.Node) and node.op == "get_attr":
            name = self._canonical_names.get(str(node.target))
            return name if name in self._saved_names else None
        return None

    def tensor_name(self, path: str, attribute: str) -> str | None:
        """Return the name of a module's parameter or buffer, if it exists."""
        return self._canonical_names.get(f"{path}.{attribute}" if path else attribute)

    def param_view(self, node: Any) -> str | None:
        """Return the name of the saved vector that a node only adds axes to, if any."""
        is_view = isinstance(node, fx.Node) and node.target in _VIEWS and bool(node.args)
        name = self.param_name(node.args[0]) if is_view else None
        shape = () if name is None else self.shape(name)
        if is_view and node.target is operator.getitem:
            steps = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
            is_view = all(step in (None, Ellipsis, slice(None)) for step in steps)
        is_view = is_view and len(shape) == 1 and 1 < shape[0] in node.meta["value"].shape
        return name if is_view else None

    def mark_varying(self, node: fx.Node) -> None:
        """Treat a value as one that depends on the input."""
        self._varying_nodes.add(node)

    # decisions

    def couple(self, left: int, right: int) -> None:
        a, b = (self.decisions.find_root(self.groups[site].layers[0]) for site in (left, right))
        if a != b:
            self.decisions.parent[b] = a

    def repeat_mask(self, site: int, period: int) -> None:
        """Decide that filters of a site which are a multiple of `period` apart share a mask."""
        group = self.groups[site]
        self.decisions.periods.update(
            (layer, period * block) for layer, block in zip(group.layers, group.blocks, strict=True)
        )

    def merge_filters(self, site: int, count: int) -> None:
        """Decide that so many adjacent filters of a site become one."""
        group = self.groups[site]
        self.decisions.blocks.update(
            (layer, count * block) for layer, block in zip(group.layers, group.blocks, strict=True)
        )

    def find_output_spans(self, layer: str, outputs: int) -> ChannelSpans | None:
        """Return the outputs of a layer of a site; None for other layers."""
        site = self.site_of_layer.get(layer)
        if site is None:
            return None
        group = self.groups[site]
        block = group.blocks[group.layers.index(layer)]
        span = ChannelSpan(group.filters, SiteFilter(site), block, frozenset({site}))
        return (span,) * (outputs // (group.filters * block))

    def fix(self, spans: Iterable[ChannelSpan], reason: str) -> None:
        """Decide that the sites of these channels keep all filters."""
        for span in spans:
            for site in channels.collect_sites(span.expression):
                for layer in self.groups[site].layers:
                    self.decisions.fixed.setdefault(layer, reason)

    def record_slicing(self, name: str | None, *dims: ChannelSpans | None) -> None:
        """Record how a parameter is sliced; two different slicings make it unsliced."""
        if name is None:
            return
        shape = self.shape(name)
        slicing: ParamSlicing = tuple(
            None if spans is None or channels.is_dense(spans) else spans
            for spans in (*dims, *([None] * (len(shape) - len(dims))))
        )
        slicing = self._slicings.setdefault(slicing, slicing)  # share equal slicings
        previous = self.program.slicings.setdefault(name, slicing)
        self.program.param_shapes[name] = shape
        if previous != slicing:
            if name in self._unsliced_names:
                spans = (span for dim in (*previous, *slicing) for span in dim or ())
                self.fix(spans, f"{name} is read in two ways")
            self.decisions.unsliced.add(name)

    def is_unsliced(self, *names: str | None) -> bool:
        return any(name in self.decisions.unsliced for name in names)

    def shape(self, name: str) -> Shape:
        return tuple(attrgetter(name)(self._net).shape)

    # instructions

    def emit(
        self,
        node: fx.Node,
        run: RunFn | None,
        reads: Iterable[int],
        layout: Layouts,
        *params: str | None,
    ) -> bool:
        """Add the instruction that computes a node from these slots and parameters.

        Without `run`, its readers get what it reads. The result is True, as a rule returns when it
        applies.
        """
        if node.meta.get("is_no_grad") and run is not None:
            run = torch.no_grad()(run)
        self._track_gradient(node, *params)
        is_size = isinstance(node.meta.get("value"), int | torch.Size)
        if not is_size and not self._varying_nodes.isdisjoint(node.all_input_nodes):
            self._varying_nodes.add(node)
        read_slots = tuple(reads)
        self._slots[node] = (
            read_slots[0] if run is None else self.add_instruction(node.name, run, read_slots)
        )
        self._layouts[node] = layout
        parts = [layout] if layout is None or isinstance(layout, ChannelLayout) else layout
        for part in parts:
            if part and not any(channels.is_never_empty(span, self._sizes) for span in part.spans):
                self.program.fragile_spans.append(part.spans)
        if not is_view(node):
            self._record_activation(node.meta.get("value"), layout)
        return True

    def replay(self, node: fx.Node, layout: Layouts, slots: Slots, *params: str | None) -> bool:
        """Add a node's own operation, reading these slots."""
        if is_delayed_relu(node, self.modules):
            return self.emit(node, None, slots.values(), layout, *params)
        target = find_overwritten_input(node, self.modules)
        if node in self.fused_runs:
            run = self.fused_runs[node]
        else:
            run = self._make_replay(node, slots) if target is None else _overwrite(target, slots)
        return self.emit(node, run, slots.values(), layout, *params)

    def slot(self, node: fx.Node) -> int:
        """Return the slot of a node's compact value."""
        if node not in self._slots:
            if self.param_view(node) is not None:
                self.replay(node, None, {n: self.slot(n) for n in node.all_input_nodes})
            else:
                self._load_attribute(node)
        return self._slots[node]

    def load_rows(self, node: fx.Node, name: str, layout: ChannelLayout) -> None:
        """Load a parameter that a layer's weight is computed from, sliced along its outputs."""
        self.record_slicing(name, *[None] * layout.axis, layout.spans)
        self._track_gradient(node, name)
        self._slots[node], self._layouts[node] = self.load_param(name), layout
        self.mark_varying(node)  # as its rows may be absent

    def densify(self, node: fx.Node, reader: str, reason: str) -> int:
        """Return the slot of a node's value with absent channels filled with zeros."""
        layout = self.layout(node)
        if layout is None:
            return self.slot(node)
        if node in self.weight_parts:  # zeros would change the rows that are kept
            self.decisions.unsliced.add(self.weight_parts[node])
        if node not in self._dense_slots:
            slot, axis, size = self.slot(node), layout.axis, channels.width(layout.spans)
            shape = broadcast_shape(axis, node.meta["value"].dim())
            factors = self.add_factors(layout.spans, shape)
            positions = self.add_query(
                lambda index: index.to_index_tensor(index.positions(layout.spans))
            )

            def run(env: Env, bound: BoundProgram) -> Tensor:
                x = bound.scale(env[slot], factors)
                return scatter_channels(x, axis, size, bound.results[positions])

            self._dense_slots[node] = self.add_instruction(f"{node.name}_dense", run, (slot,))
            self._record_activation(node.meta["value"], None)
        self.program.dense_fallbacks.append(DenseFallback(node.name, reader, reason))
        return self._dense_slots[node]

    def add_query(self, query: SubnetQuery) -> int:
        """Have something computed for each subnet; return the index of its result."""
        self.program.queries.append(query)
        return len(self.program.queries) - 1

    def add_factors(self, spans: ChannelSpans, shape: Shape) -> int | None:
        """Query pending factors as a tensor of this shape; None if nothing can be pending."""
        if not any(span.pending_sites for span in spans):
            return None

        def query(index: ChannelIndex) -> Tensor | float | None:
            factors = index.compute_factors(spans)
            if isinstance(factors, float):
                return None if factors == 1.0 else factors
            return index.to_float_tensor(factors, shape)

        return self.add_query(query)

    def record_cost(self, node: fx.Node, cost: LayerCost) -> None:
        """Record the MACs of a layer, named by its weight or, without a rule, its operation."""
        if not node.meta.get("is_no_grad"):
            has_unknown_weight = cost.layer not in self._canonical_names
            has_input_grad = next(iter(node.all_input_nodes), None) in self._grad_nodes
            has_weight_grad = has_unknown_weight or self._has_trainable(cost.layer)
            cost = replace(cost, passes=1 + has_weight_grad + has_input_grad)
        self.program.layer_costs.append(cost)

    def _has_trainable(self, *names: str | None) -> bool:
        return any(name in self._trainable_names for name in names)

    def _track_gradient(self, node: fx.Node, *names: str | None) -> None:
        """Record whether a gradient flows through a node that reads these parameters."""
        if node.meta.get("is_no_grad") or node.target in {torch.detach, "detach"}:
            return
        if self._has_trainable(*names) or not self._grad_nodes.isdisjoint(node.all_input_nodes):
            self._grad_nodes.add(node)

    def finish(self, output: Any) -> CompactProgram:
        """Complete the program: its output, groups of equal slicings, and freed slots."""
        self.program.output = output
        fragile = {id(spans): spans for spans in self.program.fragile_spans}
        self.program.fragile_spans = list(fragile.values())
        for name in self._canonical_names.keys() & self._saved_names:  # unread parameters too
            self.program.param_shapes.setdefault(self._canonical_names[name], self.shape(name))
        for name, slicing in self.program.slicings.items():
            key = self.program.param_shapes[name], slicing
            self.program.slicing_groups.setdefault(key, []).append(name)
        last_reads: dict[int, int] = {}
        for index, reads in enumerate(self._reads):
            last_reads.update(dict.fromkeys(reads, index))
        outputs = set(collect_slots(output))
        freed: list[list[int]] = [[] for _ in self._reads]
        for slot, index in last_reads.items():
            if slot not in outputs:
                freed[index].append(slot)
        for instruction, slots in zip(self.program.instructions, freed, strict=True):
            instruction.freed_slots = tuple(slots)
        return self.program

    def add_input(self, node: fx.Node) -> None:
        self._slots[node] = self._allocate_slot()
        self._layouts[node] = None
        self._varying_nodes.add(node)
        self.program.input_slots.append(self._slots[node])
        self.program.input_shapes.append(tuple(node.meta["value"].shape[1:]))

    def _allocate_slot(self) -> int:
        self.program.num_slots += 1
        return self.program.num_slots - 1

    def load_param(self, name: str) -> int:
        """Add the instruction that reads a parameter, as sliced."""
        return self.add_instruction(name, lambda _, bound: bound.params[name], ())

    def add_instruction(self, name: str, run: RunFn, reads: tuple[int, ...]) -> int:
        slot = self._allocate_slot()
        self.program.instructions.append(Instruction(run, slot, name))
        self._reads.append(reads)
        return slot

    def _load_attribute(self, node: fx.Node) -> None:
        assert node.op == "get_attr", node
        name = self.param_name(node)
        if name is not None:
            self.record_slicing(name)
            self._track_gradient(node, name)
            self._slots[node] = self.load_param(name)
            return
        constant = node.meta.get("constant")  # what the network keeps is read from it
        if constant is None:
            constant = attrgetter(str(node.target))(self._net)
        copies: dict[torch.device, Any] = {}

        def run(_: Env, bound: BoundProgram) -> Any:
            device = next(iter(bound.params.values())).device
            if device not in copies:
                copies[device] = constant.to(device) if isinstance(constant, Tensor) else constant
            return copies[device]

        self._slots[node] = self.add_instruction(node.name, run, ())

    def _make_replay(self, node: fx.Node, slots: Slots) -> RunFn:
        args, kwargs = replace_nodes((node.args, node.kwargs), slots.__getitem__)
        call = self._find_call(node)
        sources = node.all_input_nodes
        if len(sources) == 1 and is_delayed_relu(sources[0], self.modules):
            pool, relu = call, self._find_call(sources[0])
            call = lambda *args, **kwargs: relu(pool(*args, **kwargs))  # noqa: E731
        if len(args) == 1 and isinstance(args[0], Slot) and not collect_slots(kwargs):
            slot = args[0].number
            return lambda env, _: call(env[slot], **kwargs)
        return lambda env, _: call(*resolve_slots(args, env), **resolve_slots(kwargs, env))

    def _find_call(self, node: fx.Node) -> Callable[..., Any]:
        return find_callable(node, lambda path: copy_module(self.modules[path]))

    def _record_activation(self, value: Any, layout: Layouts) -> None:
        if not isinstance(value, Tensor) or value.numel() % BATCH:
            return
        spans = layout.spans if isinstance(layout, ChannelLayout) else (ChannelSpan(1),)
        unit_size = value.numel() // BATCH // channels.width(spans)
        self.program.activations.append(ActivationCost(unit_size, spans))


def _overwrite(target: fx.Node, slots: Slots) -> RunFn:
    """Return a ReLU, or a sum if there is another slot, that overwrites a value."""
    slot, *others = slots[target], *(slot for node, slot in slots.items() if node is not target)
    if not others:
        return lambda env, _: torch.relu_(env[slot])
    return lambda env, _: env[slot].add_(env[others[0]])
