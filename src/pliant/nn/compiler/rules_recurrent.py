"""The rule for recurrent layers: they read present channels, and keep all hidden units."""

from typing import Any

from torch import fx, nn
from torch.func import functional_call

from pliant.nn.compiler import channels
from pliant.nn.compiler.builder import Builder
from pliant.nn.compiler.channels import ChannelSpan
from pliant.nn.compiler.program import BoundProgram, Env, LayerCost, broadcast_shape
from pliant.nn.compiler.refusals import copy_module
from pliant.nn.compiler.trace import BATCH

RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)


def lower_recurrent(
    builder: Builder, node: fx.Node, source: fx.Node, module: nn.RNNBase, macs: int
) -> bool:
    """Lower a recurrent layer of `macs` in all, whose first input weights are sliced."""
    layout, value, path = builder.layout(source), source.meta["value"], str(node.target)
    axis = value.dim() - 1
    if layout is None or layout.axis != axis or value.dim() != 3:
        return False
    names: dict[str, str] = {}
    for key in module.state_dict():
        name = builder.tensor_name(path, key)
        if name is None or builder.is_unsliced(name):
            return False
        names[key] = name
    steps = value.numel() // value.shape[axis] // BATCH
    for key, name in names.items():
        if key in {"weight_ih_l0", "weight_ih_l0_reverse"}:
            outputs = (ChannelSpan(builder.shape(name)[0]),)
            builder.record_slicing(name, None, layout.spans)
            builder.record_cost(node, LayerCost(name, steps, outputs, layout.spans))
            macs -= steps * channels.width(outputs) * value.shape[axis]
        else:
            builder.record_slicing(name)
    builder.record_cost(node, LayerCost(path, macs, (ChannelSpan(1),), None))
    slot, factors = (
        builder.slot(source),
        builder.add_factors(layout.spans, broadcast_shape(axis, value.dim())),
    )
    replica: Any = copy_module(module)
    replica.check_forward_args = lambda *_: None  # its input has fewer channels

    def run(env: Env, bound: BoundProgram) -> Any:
        params = {key: bound.params[name] for key, name in names.items()}
        return functional_call(replica, params, (bound.scale(env[slot], factors),))

    return builder.emit(node, run, [slot], None, *names.values())
