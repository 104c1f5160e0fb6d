"""Turn a traced network into a plan: decide which layers are drawn together, lay out the pass.

Laying out may find that layers must be drawn together (their outputs meet), must not be drawn
(their channels reach the output unmixed) or must read all channels (a parameter is used in two
ways). Such a finding is a new decision and the pass is laid out again; decisions only grow, so this
ends.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from pliant.nn import channels
from pliant.nn.channels import Drawn, Layout, Piece, Pieces
from pliant.nn.decisions import Decisions, groups_of
from pliant.nn.plan import (
    Asked,
    Bound,
    Claim,
    Density,
    Environment,
    Frame,
    Instruction,
    Plan,
    Slot,
    Work,
    Written,
    filled,
    referring,
)
from pliant.nn.trace import BATCH, is_view

Run = Callable[[Environment, Bound], Any]


class Builder:
    """One laying-out of the pass."""

    def __init__(self, net: nn.Module, candidates: dict[str, int], decisions: Decisions) -> None:
        self.plan = Plan()
        self.modules = dict(net.named_modules())
        self.decisions = decisions
        self.groups = groups_of(candidates, decisions)
        self._site = {
            layer: number for number, group in enumerate(self.groups) for layer in group.layers
        }
        self._names, self._saved = _names(net), net.state_dict().keys()
        self._net = net
        self._layout: dict[fx.Node, Any] = {}
        self._slot: dict[fx.Node, int] = {}
        self._dense: dict[fx.Node, int] = {}
        self._reads: list[tuple[int, ...]] = []
        self._learns: set[fx.Node] = set()
        self._trained = {name for name, tensor in net.named_parameters() if tensor.requires_grad}
        self._claims: dict[Claim, Claim] = {}

    # what is known of values

    def layout(self, node: fx.Node) -> Layout | None:
        """Return a value's layout; None where all channels are there."""
        found: Layout | None = self._layout.get(node)
        return found

    def layouts(self, node: fx.Node) -> list[Layout | None] | None:
        """Return the layouts of a value that is a tuple of parts."""
        found = self._layout.get(node)
        return found if isinstance(found, list) else None

    def is_constant(self, node: Any) -> bool:
        """Tell whether a value does not depend on the input."""
        return not isinstance(node, fx.Node) or (
            node.op != "placeholder" and all(map(self.is_constant, node.all_input_nodes))
        )

    def site(self, layer: str) -> int | None:
        """Return the site that draws this layer's filters; None where they are all kept."""
        return self._site.get(layer)

    def parameter(self, node: Any) -> str | None:
        """Return the name of the saved parameter or buffer that a node reads, if it reads one."""
        if isinstance(node, fx.Node) and node.op == "get_attr":
            name = self._names.get(str(node.target))
            return name if name in self._saved else None
        return None

    def name(self, path: str, attribute: str) -> str | None:
        """Return the name of a module's parameter or buffer; None where it has none."""
        full = f"{path}.{attribute}" if path else attribute
        return self._names.get(full)

    # findings

    def couple(self, left: int, right: int) -> None:
        """Decide that two sites are one."""
        a, b = (self.decisions.root(self.groups[site].layers[0]) for site in (left, right))
        if a != b:
            self.decisions.partner[b] = a

    def fix(self, pieces: Iterable[Piece]) -> None:
        """Decide that the sites of these channels are never drawn."""
        for piece in pieces:
            for site in channels.sites_of(piece.expression):
                self.decisions.fixed.update(self.groups[site].layers)

    def claim(self, name: str | None, *dims: Pieces | None) -> None:
        """Say which entries of a parameter are read; two different claims make it rigid."""
        if name is None:
            return
        shape = self.shape(name)
        claim: Claim = tuple(
            None if pieces is None or channels.is_dense(pieces) else pieces
            for pieces in (*dims, *([None] * (len(shape) - len(dims))))
        )
        claim = self._claims.setdefault(claim, claim)  # equal claims are one object
        before = self.plan.claims.setdefault(name, claim)
        self.plan.shapes[name] = shape
        if before != claim:
            if name in self.decisions.rigid:
                self.fix(piece for dim in (*before, *claim) for piece in dim or ())
            self.decisions.rigid.add(name)

    def is_rigid(self, *names: str | None) -> bool:
        """Tell whether one of these parameters must read all channels."""
        return any(name in self.decisions.rigid for name in names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter or buffer."""
        found: Any = self._net
        for part in name.split("."):
            found = getattr(found, part)
        return tuple(found.shape)

    # instructions

    def emit(self, node: fx.Node, run: Run, reads: Iterable[int], layout: Layout | None) -> None:
        """Add the instruction that makes a node's value."""
        if node.meta.get("is_cut_off"):
            run = torch.no_grad()(run)
        self._slot[node] = self.add(node.name, run, tuple(reads))
        self.alias(node, layout)
        if not is_view(node):
            self._count(node.meta.get("value"), layout)

    def alias(self, node: fx.Node, layout: Layout | Sequence[Layout | None] | None) -> None:
        """Remember the layout of a node, or those of its parts."""
        self._layout[node] = layout
        for part in [layout] if layout is None or isinstance(layout, Layout) else layout:
            sizes = [group.filters for group in self.groups]
            if part and not any(channels.is_safe(piece, sizes) for piece in part.pieces):
                self.plan.fragile.append(part.pieces)

    def replay(self, node: fx.Node, layout: Layout | None, slots: dict[fx.Node, int]) -> None:
        """Add the node's own operation, reading these slots."""
        run = self._replayed(node, slots)
        self.emit(node, run, slots.values(), layout)

    def slot(self, node: fx.Node) -> int:
        """Return where a node's value is, as compact as it is."""
        if node not in self._slot:
            self._load(node)
        return self._slot[node]

    def dense(self, node: fx.Node, reader: str, why: str) -> int:
        """Return where a node's value is with all its channels, absent ones as zeros."""
        layout = self.layout(node)
        if layout is None:
            return self.slot(node)
        if node not in self._dense:
            slot, axis, size = self.slot(node), layout.axis, channels.width(layout.pieces)
            asked = self.ask(lambda frame: _spread(frame, layout, node.meta["value"].dim()))

            def run(environment: Environment, bound: Bound) -> Tensor:
                return spread(environment[slot], axis, size, *bound.answers[asked])

            self._dense[node] = self.add(f"{node.name}_dense", run, (slot,))
            self._count(node.meta["value"], None)
        self.plan.densities.append(Density(node.name, reader, why))
        return self._dense[node]

    def ask(self, question: Asked) -> int:
        """Have something worked out for each subnet; return where the answer will be."""
        self.plan.asked.append(question)
        return len(self.plan.asked) - 1

    def ask_factors(self, pieces: Pieces, shape: tuple[int, ...]) -> int | None:
        """Ask for pending factors as a tensor of this shape; None where nothing can be pending."""
        if not any(piece.pending for piece in pieces):
            return None

        def question(frame: Frame) -> Tensor | float | None:
            found = frame.factors(pieces)
            if isinstance(found, float):
                return None if found == 1.0 else found
            return frame.numbers(found, shape)

        return self.ask(question)

    def work(
        self, node: fx.Node, layer: str, outputs: Pieces, inputs: Pieces | None, each: int
    ) -> None:
        """Count multiply-adds; `layer` is a weight, or an operation that no rule knows."""
        source = next(iter(node.all_input_nodes), None)
        passes = 1
        if not node.meta.get("is_cut_off"):
            passes += (layer not in self._names or self.trains(layer)) + (source in self._learns)
        self.plan.works.append(Work(layer, each, outputs, inputs, passes))

    def trains(self, *names: str | None) -> bool:
        """Tell whether one of these parameters is trained."""
        return any(name in self._trained for name in names)

    def learn(self, node: fx.Node, *names: str | None) -> None:
        """Remember whether a gradient flows through a node that reads these parameters."""
        if node.meta.get("is_cut_off") or node.target in {torch.detach, "detach"}:
            return
        if self.trains(*names) or any(source in self._learns for source in node.all_input_nodes):
            self._learns.add(node)

    def finish(self, output: Any) -> Plan:
        """Close the plan: note the output, when each slot is read last, and equal slices."""
        self.plan.output = output
        for name in self._names.keys() & self._saved:  # what nobody reads is sent and stored too
            self.plan.shapes.setdefault(self._names[name], self.shape(name))
        forms: dict[tuple[tuple[int, ...], Claim], list[str]] = {}
        for name, claim in self.plan.claims.items():
            forms.setdefault((self.plan.shapes[name], claim), []).append(name)
        self.plan.forms = list(forms.items())
        last: dict[int, int] = {}
        for number, reads in enumerate(self._reads):
            last.update(dict.fromkeys(reads, number))
        kept = set(_slots(output))
        done: list[list[int]] = [[] for _ in self._reads]
        for slot, number in last.items():
            if slot not in kept:
                done[number].append(slot)
        self.plan.instructions = [
            Instruction(made.run, made.slot, made.name, tuple(done[number]))
            for number, made in enumerate(self.plan.instructions)
        ]
        return self.plan

    def place(self, node: fx.Node) -> None:
        """Give an input of the network its slot."""
        self._slot[node] = self._new()
        self._layout[node] = None
        self.plan.inputs.append(self._slot[node])

    def _new(self) -> int:
        self.plan.slots += 1
        return self.plan.slots - 1

    def own(self, module: nn.Module) -> nn.Module:
        """Return a copy of a module in training mode, apart from the user's own."""
        return copy.deepcopy(module).train()

    def load(self, name: str) -> int:
        """Add the instruction that reads a parameter, as much of it as is claimed."""
        return self.add(name, lambda _, bound: bound.params[name], ())

    def add(self, name: str, run: Run, reads: tuple[int, ...]) -> int:
        """Add an instruction and return its slot."""
        slot = self._new()
        self.plan.instructions.append(Instruction(run, slot, name))
        self._reads.append(reads)
        return slot

    def _load(self, node: fx.Node) -> None:
        assert node.op == "get_attr", node
        name = self.parameter(node)
        if name is not None:
            self.claim(name)
            self.learn(node, name)
            self._slot[node] = self.load(name)
            return
        constant: Any = self._net
        for part in str(node.target).split("."):
            constant = getattr(constant, part)
        moved: dict[torch.device, Any] = {}

        def run(_: Environment, bound: Bound) -> Any:
            home = next(iter(bound.params.values())).device
            if home not in moved:
                moved[home] = constant.to(home) if isinstance(constant, Tensor) else constant
            return moved[home]

        self._slot[node] = self.add(node.name, run, ())

    def _replayed(self, node: fx.Node, slots: dict[fx.Node, int]) -> Run:
        args, kwargs = referring((node.args, node.kwargs), slots.__getitem__)
        target: Callable[..., Any]
        if node.op == "call_module":
            target = self.own(self.modules[str(node.target)])
        elif node.op == "call_method":
            method = str(node.target)

            def target(first: Any, *rest: Any, **options: Any) -> Any:
                return getattr(first, method)(*rest, **options)
        else:
            assert callable(node.target)
            target = node.target
        if len(args) == 1 and isinstance(args[0], Slot) and not _slots(kwargs):
            only = args[0].number
            return lambda environment, _: target(environment[only], **kwargs)
        return lambda environment, _: target(
            *filled(args, environment), **filled(kwargs, environment)
        )

    def _count(self, value: Any, layout: Layout | None) -> None:
        if not isinstance(value, Tensor) or value.numel() % BATCH:
            return
        pieces = layout.pieces if layout else (Piece(1),)
        each = value.numel() // BATCH // channels.width(pieces)
        self.plan.written.append(Written(each, pieces))


def spread(value: Tensor, axis: int, size: int, index: Tensor, factor: Any) -> Tensor:
    """Put kept channels at their places among zeros, with their factor."""
    if factor is not None:
        value = value * factor
    shape = list(value.shape)
    shape[axis] = size
    return value.new_zeros(shape).index_copy(axis, index, value)


def along(axis: int, dims: int) -> tuple[int, ...]:
    """Return the shape of a vector that lies along one axis."""
    return tuple(-1 if dim == axis else 1 for dim in range(dims))


def _spread(frame: Frame, layout: Layout, dims: int) -> tuple[Tensor, Any]:
    factor: Any = frame.factors(layout.pieces)
    if isinstance(factor, float):
        factor = None if factor == 1.0 else factor
    else:
        factor = frame.numbers(factor, along(layout.axis, dims))
    return frame.index(frame.kept(layout.pieces)), factor


def _slots(structure: Any) -> list[int]:
    found: list[int] = []
    if isinstance(structure, Slot):
        found.append(structure.number)
    elif isinstance(structure, tuple | list):
        for part in structure:
            found.extend(_slots(part))
    elif isinstance(structure, dict):
        found.extend(_slots(list(structure.values())))
    elif isinstance(structure, slice):
        found.extend(_slots([structure.start, structure.stop, structure.step]))
    return found


def _names(net: nn.Module) -> dict[str, str]:
    """Map every name of a parameter or buffer to its first one (tied tensors have several)."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for kind in (net.named_parameters, net.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            found[name] = first.setdefault(id(tensor), name)
    return found


def drawn(site: int, size: int, axis: int) -> Layout:
    """Return the layout of a layer that a site draws."""
    return Layout(axis, (Piece(size, Drawn(site), 1, frozenset({site})),))
