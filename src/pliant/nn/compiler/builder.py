"""Build the compact program of a traced network.

Lowering may discover that layers must share a mask (their outputs are added), must keep all filters
(their channels reach the output), or must read all channels (a parameter is used in two ways). Such
a decision restarts the lowering. Decisions only accumulate, so this terminates.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from pliant.nn.compiler import channels
from pliant.nn.compiler.channels import ChannelLayout, ChannelSpan, ChannelSpans, SiteFilter
from pliant.nn.compiler.coupling import Decisions, group_layers
from pliant.nn.compiler.program import (
    ActivationCost,
    BoundProgram,
    ChannelIndex,
    CompactProgram,
    DenseFallback,
    Environment,
    Instruction,
    LayerCost,
    ParamSlicing,
    Slot,
    SubnetQuery,
    replace_nodes,
    resolve_slots,
)
from pliant.nn.compiler.trace import BATCH, is_view

InstructionFn = Callable[[Environment, BoundProgram], Any]


class ProgramBuilder:
    """One attempt at lowering a network, under the decisions so far."""

    def __init__(self, net: nn.Module, candidates: dict[str, int], decisions: Decisions) -> None:
        self.program = CompactProgram()
        self.modules = dict(net.named_modules())
        self.decisions = decisions
        self.groups = group_layers(candidates, decisions)
        self._site_of_layer = {
            layer: site_index
            for site_index, group in enumerate(self.groups)
            for layer in group.layers
        }
        self._canonical_names = _find_canonical_names(net)
        self._saved_names = net.state_dict().keys()
        self._net = net
        self._layouts: dict[fx.Node, Any] = {}
        self._slots: dict[fx.Node, int] = {}
        self._dense_slots: dict[fx.Node, int] = {}
        self._reads: list[tuple[int, ...]] = []
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
        return not isinstance(node, fx.Node) or (
            node.op != "placeholder" and all(map(self.is_constant, node.all_input_nodes))
        )

    def site(self, layer: str) -> int | None:
        """Return the site of a layer; None if it keeps all filters."""
        return self._site_of_layer.get(layer)

    def param_name(self, node: Any) -> str | None:
        """Return the name of the saved parameter or buffer that a node reads, if any."""
        if isinstance(node, fx.Node) and node.op == "get_attr":
            name = self._canonical_names.get(str(node.target))
            return name if name in self._saved_names else None
        return None

    def tensor_name(self, path: str, attribute: str) -> str | None:
        """Return the name of a module's parameter or buffer, if it exists."""
        full = f"{path}.{attribute}" if path else attribute
        return self._canonical_names.get(full)

    # decisions

    def couple(self, left: int, right: int) -> None:
        """Decide that two sites share one mask."""
        a, b = (self.decisions.find_root(self.groups[site].layers[0]) for site in (left, right))
        if a != b:
            self.decisions.parent[b] = a

    def fix(self, spans: Iterable[ChannelSpan]) -> None:
        """Decide that the sites of these channels keep all filters."""
        for span in spans:
            for site in channels.collect_sites(span.expression):
                self.decisions.fixed.update(self.groups[site].layers)

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
            if name in self.decisions.unsliced:
                self.fix(span for dim in (*previous, *slicing) for span in dim or ())
            self.decisions.unsliced.add(name)

    def is_unsliced(self, *names: str | None) -> bool:
        """Return whether one of these parameters must be kept in full."""
        return any(name in self.decisions.unsliced for name in names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter or buffer."""
        value: Any = self._net
        for part in name.split("."):
            value = getattr(value, part)
        return tuple(value.shape)

    # instructions

    def emit(
        self, node: fx.Node, run: InstructionFn, reads: Iterable[int], layout: ChannelLayout | None
    ) -> None:
        """Add the instruction that computes a node."""
        if node.meta.get("is_no_grad"):
            run = torch.no_grad()(run)
        self._slots[node] = self.add_instruction(node.name, run, tuple(reads))
        self.set_layout(node, layout)
        if not is_view(node):
            self._record_activation(node.meta.get("value"), layout)

    def set_layout(
        self, node: fx.Node, layout: ChannelLayout | Sequence[ChannelLayout | None] | None
    ) -> None:
        """Record the layout of a node, or of its parts."""
        self._layouts[node] = layout
        for part in [layout] if layout is None or isinstance(layout, ChannelLayout) else layout:
            sizes = [group.filters for group in self.groups]
            if part and not any(channels.is_never_empty(span, sizes) for span in part.spans):
                self.program.fragile_spans.append(part.spans)

    def replay(
        self, node: fx.Node, layout: ChannelLayout | None, slots: dict[fx.Node, int]
    ) -> None:
        """Add a node's own operation, reading these slots."""
        run = self._make_replay(node, slots)
        self.emit(node, run, slots.values(), layout)

    def slot(self, node: fx.Node) -> int:
        """Return the slot of a node's compact value."""
        if node not in self._slots:
            self._load_attribute(node)
        return self._slots[node]

    def densify(self, node: fx.Node, reader: str, why: str) -> int:
        """Return the slot of a node's value with absent channels filled with zeros."""
        layout = self.layout(node)
        if layout is None:
            return self.slot(node)
        if node not in self._dense_slots:
            slot, axis, size = self.slot(node), layout.axis, channels.width(layout.spans)
            query = self.register_query(
                lambda index: _compute_scatter(index, layout, node.meta["value"].dim())
            )

            def run(environment: Environment, bound: BoundProgram) -> Tensor:
                return scatter_channels(environment[slot], axis, size, *bound.query_results[query])

            self._dense_slots[node] = self.add_instruction(f"{node.name}_dense", run, (slot,))
            self._record_activation(node.meta["value"], None)
        self.program.dense_fallbacks.append(DenseFallback(node.name, reader, why))
        return self._dense_slots[node]

    def register_query(self, query: SubnetQuery) -> int:
        """Compute something for each subnet; return the index of its result."""
        self.program.queries.append(query)
        return len(self.program.queries) - 1

    def register_factors(self, spans: ChannelSpans, shape: tuple[int, ...]) -> int | None:
        """Query pending factors as a tensor of this shape; None if nothing can be pending."""
        if not any(span.pending_sites for span in spans):
            return None

        def query(index: ChannelIndex) -> Tensor | float | None:
            factors = index.compute_factors(spans)
            if isinstance(factors, float):
                return None if factors == 1.0 else factors
            return index.to_float_tensor(factors, shape)

        return self.register_query(query)

    def record_cost(
        self,
        node: fx.Node,
        layer: str,
        outputs: ChannelSpans,
        inputs: ChannelSpans | None,
        unit_macs: int,
    ) -> None:
        """Record the MACs of a layer, named by its weight or, without a rule, its operation."""
        source = next(iter(node.all_input_nodes), None)
        passes = 1
        if not node.meta.get("is_no_grad"):
            passes += (layer not in self._canonical_names or self.has_trainable(layer)) + (
                source in self._grad_nodes
            )
        self.program.layer_costs.append(LayerCost(layer, unit_macs, outputs, inputs, passes))

    def has_trainable(self, *names: str | None) -> bool:
        """Return whether one of these parameters is trainable."""
        return any(name in self._trainable_names for name in names)

    def track_gradient(self, node: fx.Node, *names: str | None) -> None:
        """Record whether a gradient flows through a node that reads these parameters."""
        if node.meta.get("is_no_grad") or node.target in {torch.detach, "detach"}:
            return
        if self.has_trainable(*names) or any(
            source in self._grad_nodes for source in node.all_input_nodes
        ):
            self._grad_nodes.add(node)

    def finish(self, output: Any) -> CompactProgram:
        """Complete the program: its output, groups of equal slicings, and freed slots."""
        self.program.output = output
        for name in self._canonical_names.keys() & self._saved_names:  # unread parameters too
            self.program.param_shapes.setdefault(self._canonical_names[name], self.shape(name))
        groups: dict[tuple[tuple[int, ...], ParamSlicing], list[str]] = {}
        for name, slicing in self.program.slicings.items():
            groups.setdefault((self.program.param_shapes[name], slicing), []).append(name)
        self.program.slicing_groups = list(groups.items())
        last_reads: dict[int, int] = {}
        for index, reads in enumerate(self._reads):
            last_reads.update(dict.fromkeys(reads, index))
        outputs = set(_collect_slots(output))
        freed: list[list[int]] = [[] for _ in self._reads]
        for slot, index in last_reads.items():
            if slot not in outputs:
                freed[index].append(slot)
        self.program.instructions = [
            Instruction(instruction.run, instruction.slot, instruction.name, tuple(freed[index]))
            for index, instruction in enumerate(self.program.instructions)
        ]
        return self.program

    def add_input(self, node: fx.Node) -> None:
        """Allocate the slot of a network input."""
        self._slots[node] = self._allocate_slot()
        self._layouts[node] = None
        self.program.input_slots.append(self._slots[node])

    def _allocate_slot(self) -> int:
        self.program.num_slots += 1
        return self.program.num_slots - 1

    def copy_module(self, module: nn.Module) -> nn.Module:
        """Copy a module in training mode."""
        return copy.deepcopy(module).train()

    def load_param(self, name: str) -> int:
        """Add the instruction that reads a parameter, as sliced."""
        return self.add_instruction(name, lambda _, bound: bound.params[name], ())

    def add_instruction(self, name: str, run: InstructionFn, reads: tuple[int, ...]) -> int:
        """Add an instruction and return its slot."""
        slot = self._allocate_slot()
        self.program.instructions.append(Instruction(run, slot, name))
        self._reads.append(reads)
        return slot

    def _load_attribute(self, node: fx.Node) -> None:
        assert node.op == "get_attr", node
        name = self.param_name(node)
        if name is not None:
            self.record_slicing(name)
            self.track_gradient(node, name)
            self._slots[node] = self.load_param(name)
            return
        constant: Any = self._net
        for part in str(node.target).split("."):
            constant = getattr(constant, part)
        copies: dict[torch.device, Any] = {}

        def run(_: Environment, bound: BoundProgram) -> Any:
            device = next(iter(bound.params.values())).device
            if device not in copies:
                copies[device] = constant.to(device) if isinstance(constant, Tensor) else constant
            return copies[device]

        self._slots[node] = self.add_instruction(node.name, run, ())

    def _make_replay(self, node: fx.Node, slots: dict[fx.Node, int]) -> InstructionFn:
        args, kwargs = replace_nodes((node.args, node.kwargs), slots.__getitem__)
        target: Callable[..., Any]
        if node.op == "call_module":
            target = self.copy_module(self.modules[str(node.target)])
        elif node.op == "call_method":
            method = str(node.target)

            def target(first: Any, *rest: Any, **options: Any) -> Any:
                return getattr(first, method)(*rest, **options)
        else:
            assert callable(node.target)
            target = node.target
        if len(args) == 1 and isinstance(args[0], Slot) and not _collect_slots(kwargs):
            slot = args[0].number
            return lambda environment, _: target(environment[slot], **kwargs)
        return lambda environment, _: target(
            *resolve_slots(args, environment), **resolve_slots(kwargs, environment)
        )

    def _record_activation(self, value: Any, layout: ChannelLayout | None) -> None:
        if not isinstance(value, Tensor) or value.numel() % BATCH:
            return
        spans = layout.spans if layout else (ChannelSpan(1),)
        unit_size = value.numel() // BATCH // channels.width(spans)
        self.program.activations.append(ActivationCost(unit_size, spans))


def scatter_channels(value: Tensor, axis: int, size: int, index: Tensor, factor: Any) -> Tensor:
    """Scatter kept channels, scaled by their factor, into zeros."""
    if factor is not None:
        value = value * factor
    shape = list(value.shape)
    shape[axis] = size
    return value.new_zeros(shape).index_copy(axis, index, value)


def broadcast_shape(axis: int, dims: int) -> tuple[int, ...]:
    """Return the shape that broadcasts a vector along one axis."""
    return tuple(-1 if dim == axis else 1 for dim in range(dims))


def _compute_scatter(
    channel_index: ChannelIndex, layout: ChannelLayout, dims: int
) -> tuple[Tensor, Any]:
    factor: Any = channel_index.compute_factors(layout.spans)
    if isinstance(factor, float):
        factor = None if factor == 1.0 else factor
    else:
        factor = channel_index.to_float_tensor(factor, broadcast_shape(layout.axis, dims))
    return channel_index.to_index_tensor(channel_index.positions(layout.spans)), factor


def _collect_slots(structure: Any) -> list[int]:
    slots: list[int] = []
    if isinstance(structure, Slot):
        slots.append(structure.number)
    elif isinstance(structure, tuple | list):
        for part in structure:
            slots.extend(_collect_slots(part))
    elif isinstance(structure, dict):
        slots.extend(_collect_slots(list(structure.values())))
    elif isinstance(structure, slice):
        slots.extend(_collect_slots([structure.start, structure.stop, structure.step]))
    return slots


def _find_canonical_names(net: nn.Module) -> dict[str, str]:
    """Map each name of a parameter or buffer to its first one (tied tensors have several)."""
    first_names: dict[int, str] = {}
    names: dict[str, str] = {}
    for iterate in (net.named_parameters, net.named_buffers):
        for name, tensor in iterate(remove_duplicate=False):
            names[name] = first_names.setdefault(id(tensor), name)
    return names


def make_site_layout(site: int, size: int, axis: int) -> ChannelLayout:
    """Return the output layout of a layer with a site."""
    return ChannelLayout(axis, (ChannelSpan(size, SiteFilter(site), 1, frozenset({site})),))
