"""Check an elastic network against the network that it was made from.

With all filters kept, output, gradients and buffers must be those of the plain network; with some
dropped, those of a full-size run with masks (`masked_run`). Each runs once, on a few samples: a
small network in double precision, a large one only if it differs in its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from math import hypot, isfinite, prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import _pytree as pytree

from pliant.nn.compiler.graphs import find_module, find_module_ends
from pliant.nn.compiler.preserve import seed_generators
from pliant.nn.compiler.program import BoundProgram, Env, Instruction, execute
from pliant.nn.compiler.refusals import NotTraceable
from pliant.nn.fixed_randomness import FixedRandomness
from pliant.nn.masked_run import MaskedRun
from pliant.nn.subnet import Subnet
from pliant.params import Params, get_params
from pliant.rng import rng_stream

if TYPE_CHECKING:
    from pliant.nn.elastic import Elastic

SAMPLES = (2, 8)  # at least and at most; batch norm cannot train on one
NORM_VALUES = 16  # per channel; the gradients of batch norm over fewer are mostly rounding
RATE = 0.5
SMALL_MACS = 5e7  # per sample; above, double precision takes too long
# of the norm of a gradient; a tenth of it for outputs and buffers
DOUBLE_TOLERANCE, SINGLE_TOLERANCE = 1e-5, 5e-3
LARGE_TOLERANCE = 0.2  # single precision again: rounding grows with every layer
NOISE = 0.05  # of all gradients; that of a bias before batch norm is nothing but rounding

Finish = Callable[[Any], None]  # computes gradients from the output of a forward pass
Run = Callable[[Params, Finish], Any]  # runs a forward pass with these parameters and buffers


@dataclass(frozen=True)
class PassResult:
    """What one training pass gives, with all sizes as in the full network."""

    outputs: list[Tensor]
    grads: Params
    buffers: Params


def check_elastic(net: "Elastic", graph: fx.Graph, inputs: Sequence[Tensor]) -> bool:
    """Raise if the compact pass differs from the plain network, naming where.

    Return whether all could be compared.
    """
    params = get_params(net.module)
    floats = [tensor for tensor in (*params.values(), *inputs) if tensor.is_floating_point()]
    if not floats or any(tensor.is_meta for tensor in floats):
        return False
    own = floats[0].dtype
    is_small = own != torch.float64 and net.macs(0.0) <= SMALL_MACS
    problems: dict[torch.dtype, str] = {}
    for dtype in dict.fromkeys([torch.float64, own] if is_small else [own, torch.float64]):
        tolerance = SINGLE_TOLERANCE if is_small else LARGE_TOLERANCE
        tolerance = DOUBLE_TOLERANCE if dtype == torch.float64 else tolerance
        check = ElasticCheck(net, graph, dtype, tolerance, params, inputs)
        try:
            problem = check.find_problem()
        except _PlainFailure as error:
            if dtype == own:
                raise NotTraceable(str(error)) from error.__cause__
            continue  # it needs its own precision
        if problem is None:  # the other precision is rounded more, or not what was traced
            return check.is_complete
        problems[dtype] = problem
    problem = problems.get(torch.float64) or problems[own]
    raise NotTraceable(f"{problem}. Rewrite that part, or skip this check with check=False")


class _PlainFailure(Exception):
    """The plain network cannot run on the example."""


class _PlainStep(nn.Module):
    """A training pass of a network, as one call."""

    def __init__(self, net: nn.Module, finish: Finish) -> None:
        super().__init__()
        self.net, self._finish = net, finish

    def forward(self, *inputs: Tensor) -> None:
        self._finish(self.net(*inputs))


class ElasticCheck:
    """The runs and comparisons of one check."""

    def __init__(
        self,
        net: "Elastic",
        graph: fx.Graph,
        dtype: torch.dtype,
        tolerance: float,
        params: Params,
        inputs: Sequence[Tensor],
    ) -> None:
        self._net, self._graph, self._module = net, graph, net.module
        self._dtype, self._tolerance = dtype, tolerance
        self._params = {name: self._convert(tensor) for name, tensor in params.items()}
        self._num_samples = _count_samples(net.module, graph)
        samples = [_make_samples(x, self._num_samples, i) for i, x in enumerate(inputs)]
        self._samples = [self._convert(tensor) for tensor in samples]
        self._device = inputs[0].device
        self.is_complete = False

    def find_problem(self) -> str | None:
        """Return what differs and in which module; None if all agree."""
        bound = self._net.bind(self._net.full, self._device, self._dtype)
        try:
            with FixedRandomness():
                plain = self._run_pass(self._run_plain, self._params)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise _PlainFailure(
                f"{type(self._module).__name__} fails on {self._num_samples} samples like the "
                f"example: {reason}"
            ) from error
        with FixedRandomness():
            compact = self._run_pass(partial(self._run_compact, bound), self._params)
        if difference := self._compare(compact, plain):
            path = self._find_plain_difference(bound) or self._find_gradient_module(compact, plain)
            return (
                f"{path} is not traced as it runs: with all filters kept, the {difference} from "
                "the plain network's"
            )
        # NaN would be taken for absent channels
        self.is_complete = all(
            tensor.isfinite().all() for tensor in (*plain.outputs, *plain.grads.values())
        )
        return self._check_subnet() if self._net.sites and self.is_complete else None

    def _check_subnet(self) -> str | None:
        """Compare a random subnet with the masked run; factors are 1, as masks are compared."""
        drawn = self._net.draw(RATE, rng_stream(0, "check"), "rounded")
        subnet = Subnet(drawn.network, drawn.masks, (1.0,) * len(drawn.masks))
        bound = self._net.bind(subnet, self._device, self._dtype)
        with FixedRandomness(is_constant=True):
            masked = self._run_pass(partial(self._run_masked, subnet), self._params)
            small = self._net.take(self._params, bound)
            compact = self._run_pass(partial(self._run_compact, bound), small)
        grads, _ = self._net.embed(
            {name: self._params[name] for name in compact.grads}, compact.grads, bound
        )
        compact = replace(compact, grads=grads)
        masked = replace(masked, buffers=self._net.take(masked.buffers, bound))
        if difference := self._compare(compact, masked):
            path = self._find_masked_difference(subnet, bound)
            path = path or self._find_gradient_module(compact, masked)
            return (
                f"{path} is not narrowed right: with half of the filters dropped, the {difference} "
                "from that of the full network with masks"
            )
        return None

    # runs

    def _run_pass(self, run: Run, params: Params) -> PassResult:
        values = {name: tensor.clone() for name, tensor in params.items()}
        leaves = {name: values[name] for name in values if name in self._net.trainable_names}
        for leaf in leaves.values():
            leaf.requires_grad_()
        outputs: list[Tensor] = []

        def finish(output: Any) -> None:
            outputs.extend(_flatten_outputs(output))
            loss = _sum_outputs(outputs)
            if loss is not None:
                loss.backward()  # type: ignore[no-untyped-call] # torch does not annotate it

        seed_generators(0)
        run(values, finish)
        return PassResult(
            [output.detach() for output in outputs],
            {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in leaves.items()},
            {name: values[name].detach() for name in values if name in self._net.buffer_names},
        )

    def _run_plain(self, values: Params, finish: Finish) -> None:
        # backward while the parameters are in place, as checkpointing runs parts again
        step = _PlainStep(self._module, finish)
        named = {f"net.{name}": tensor for name, tensor in values.items()}
        functional_call(step, named, tuple(self._samples))
        values.update({name: named[f"net.{name}"] for name in values})  # buffers may be replaced

    def _run_compact(self, bound: BoundProgram, values: Params, finish: Finish) -> None:
        finish(execute(bound, values, self._samples))

    def _run_masked(self, subnet: Subnet, values: Params, finish: Finish) -> MaskedRun:
        masks = {
            id(self._module.get_parameter(layer)): torch.from_numpy(mask[filters]).to(self._device)
            for group, mask in zip(self._net.groups, subnet.masks, strict=True)
            for layer, filters in group.list_outputs(self._find_shape).items()
        }
        dense_reads = {(d.value, d.reader) for d in self._net.dense_fallbacks}
        run = MaskedRun(self._module, values, masks, dense_reads)
        finish(run.run(self._graph, *self._samples))
        return run

    def _find_shape(self, layer: str) -> torch.Size:
        return self._module.get_parameter(layer).shape

    def _record(self, bound: BoundProgram, params: Params) -> dict[str, Any]:
        """Return the compact values by node."""
        values: dict[str, Any] = {}

        def record(instruction: Instruction) -> Instruction:
            def run(env: Env, bound: BoundProgram) -> Any:
                result = instruction.run(env, bound)
                values[instruction.name] = _copy(result)
                return result

            return replace(instruction, run=run)

        program = replace(
            bound.program, instructions=[record(item) for item in bound.program.instructions]
        )
        recording = BoundProgram(program, bound.channel_index)
        with torch.no_grad():
            self._run_pass(partial(self._run_compact, recording), params)
        return values

    # comparisons

    def _compare(self, actual: PassResult, expected: PassResult) -> str | None:
        if len(actual.outputs) != len(expected.outputs):
            return f"number of outputs ({len(actual.outputs)}) differs"
        for index, pair in enumerate(zip(actual.outputs, expected.outputs, strict=True)):
            if gap := self._measure(*pair):
                return f"output {index} differs by {gap}"
        total = _measure_norm(expected.grads)
        for name in reversed(actual.grads):  # they are lost from some layer backwards
            if gap := self._measure(actual.grads[name], expected.grads[name], total):
                return f"gradient of {name} differs by {gap}"
        for name in actual.buffers:
            if gap := self._measure(actual.buffers[name], expected.buffers[name]):
                return f"buffer {name} differs by {gap}"
        return None

    def _measure(self, actual: Tensor, expected: Tensor, total: float | None = None) -> str:
        """Return how much two tensors differ, relative to the expected one; empty if they agree."""
        if actual.shape != expected.shape:
            return f"its shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
        if not actual.is_floating_point():
            actual, expected = actual.double(), expected.double()
        gap, size = float((actual - expected).norm()), float(expected.norm())
        if not isfinite(gap):
            is_same = (actual == expected) | (actual.isnan() & expected.isnan())
            gap = float(torch.where(is_same, 0.0, actual - expected).norm())
            size = float(torch.where(expected.isfinite(), expected, 0.0).norm())
        limit = 0.1 * size + 1e-3 if total is None else size + NOISE * total
        if gap <= self._tolerance * limit:
            return ""
        return f"{gap:.2g} (its size is {size:.2g})"

    def _find_gradient_module(self, actual: PassResult, expected: PassResult) -> str:
        total = _measure_norm(expected.grads)
        for name in reversed(actual.grads):
            if self._measure(actual.grads[name], expected.grads[name], total):
                return name.rpartition(".")[0] or type(self._module).__name__
        return type(self._module).__name__

    def _find_plain_difference(self, bound: BoundProgram) -> str:
        """Return the first module whose output differs from that in the plain network."""
        outputs: dict[int, Any] = {}

        def hook(module: nn.Module, _: Any, output: Any) -> None:
            outputs.setdefault(id(module), _copy(output))

        handle = register_module_forward_hook(hook)
        try:
            with FixedRandomness(), torch.no_grad():
                self._run_pass(self._run_plain, self._params)
        finally:
            handle.remove()
        with FixedRandomness():
            values = self._record(bound, self._params)
        for path, node in find_module_ends(self._graph):
            expected = outputs.get(id(self._module.get_submodule(path)))
            if self._differs(values.get(node.name), expected):
                return path
        return ""

    def _find_masked_difference(self, subnet: Subnet, bound: BoundProgram) -> str:
        """Return the module of the first value whose present entries differ."""
        with FixedRandomness(is_constant=True), torch.no_grad():
            seed_generators(0)
            values = {name: tensor.clone() for name, tensor in self._params.items()}
            run = self._run_masked(subnet, values, lambda _: None)
            compact = self._record(bound, self._net.take(self._params, bound))
        for node, mask in run.masks.items():
            value, expected = compact.get(node.name), run.values[node]
            if isinstance(value, Tensor) and isinstance(expected, Tensor):
                if isinstance(mask, Tensor):
                    value, expected = value.flatten(), expected[mask]
                if self._differs(value, expected):
                    return find_module(node) or type(self._module).__name__
        return ""

    def _differs(self, actual: Any, expected: Any) -> bool:
        if not isinstance(actual, Tensor) or not isinstance(expected, Tensor):
            return False
        return bool(self._measure(actual, expected))

    def _convert(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def _count_samples(net: nn.Module, graph: fx.Graph) -> int:
    """Return enough samples for every batch norm to see several values of each channel."""
    sizes = [
        prod(node.meta["value"].shape[2:])
        for node in graph.find_nodes(op="call_module")
        if isinstance(net.get_submodule(str(node.target)), _BatchNorm)
    ]
    least, most = SAMPLES
    return max(least, min(most, -(-NORM_VALUES // min(sizes, default=NORM_VALUES))))


def _make_samples(example: Tensor, count: int, index: int) -> Tensor:
    """Return a batch like the example, with noise that keeps positive numbers positive."""
    samples = torch.cat([example.detach()] * -(-count // len(example)))[:count]
    if not samples.is_floating_point():
        return samples
    noise = rng_stream(0, "check", index).random(tuple(samples.shape))
    return samples + torch.from_numpy(noise).to(samples)


def _flatten_outputs(output: Any) -> list[Tensor]:
    if is_dataclass(output) and not isinstance(output, type):
        output = [getattr(output, field.name) for field in fields(output)]
    leaves = pytree.tree_leaves(output)
    nested = [leaf for leaf in leaves if is_dataclass(leaf) and not isinstance(leaf, type)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [torch.view_as_real(t) if t.is_complex() else t for t in tensors] + [
        tensor for leaf in nested for tensor in _flatten_outputs(leaf)
    ]


def _sum_outputs(outputs: list[Tensor]) -> Tensor | None:
    """Return a loss that depends differently on every entry."""
    terms = [
        (
            output
            * torch.from_numpy(rng_stream(0, "check", "loss", i).random(tuple(output.shape))).to(
                output
            )
        ).sum()
        for i, output in enumerate(outputs)
        if output.requires_grad
    ]
    return torch.stack([term.to(terms[0].dtype) for term in terms]).sum() if terms else None


def _measure_norm(tensors: Params) -> float:
    return hypot(*(float(tensor.nan_to_num(0.0).norm()) for tensor in tensors.values()))


def _copy(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)
