"""The oracle for elastic networks: run any network eagerly at full size, with masks.

It shares nothing with the compact pass: no trace, no indices of kept channels. Every value in the
network's own `forward` is a full-size tensor that records, for each channel, whether it is present,
which mask decided that, and which factors are pending. An operation without a rule gets the dense
value: absent channels as zeros, all factors applied.

Not modelled: an in-place operation on a view does not change the viewed tensor. A value that
escapes (e.g. into a custom `autograd.Function`) has no data and fails, so nothing goes unnoticed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from tests.nn import masked_attention as attention
from tests.nn import masked_rules as rules
from tests.nn import masked_shapes as shapes
from tests.nn.masked_rules import (
    Operation,
    Result,
    Value,
    bind_args,
    mask_channels,
    to_dense,
)
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils._pytree import tree_leaves, tree_map

# site id, mask over filters (repeated), scale 1/q, maybe adjacent outputs of one filter
Layer = tuple[int, Tensor, float] | tuple[int, Tensor, float, int]
_RUNNING = 0  # in place of the id of a weight: the layer that runs
Rule = Callable[[Operation, Sequence[Any], dict[str, Any]], Result]

_RULES: dict[Rule, str] = {
    rules.arithmetic: """add sub subtract mul multiply div divide true_divide pow __radd__ __rsub__
        __rmul__ __rdiv__ __rtruediv__ __rpow__""",
    rules.elementwise: """relu relu6 sigmoid tanh gelu silu hardswish hardsigmoid hardtanh
        leaky_relu elu selu celu softplus softsign mish tanhshrink hardshrink softshrink logsigmoid
        log_sigmoid threshold _threshold rrelu dropout dropout1d dropout2d dropout3d alpha_dropout
        feature_alpha_dropout feature_dropout exp expm1 log log1p sqrt rsqrt square abs neg negative
        reciprocal sin cos erf sign clamp clamp_min clamp_max clip detach to float
        double half bfloat16 type type_as masked_fill""",
    attention.softmax: "softmax log_softmax",
    attention.product: "matmul bmm __matmul__",
    attention.attention: "scaled_dot_product_attention",
    rules.prelu: "prelu",
    rules.pooling: """max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d lp_pool1d
        lp_pool2d lp_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
        adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d""",
    rules.interpolate: "interpolate",
    rules.pad: "pad",
    rules.reduction: "mean sum amax amin",
    rules.batch_norm: "batch_norm",
    rules.instance_norm: "instance_norm",
    rules.group_norm: "group_norm",
    rules.layer_norm: "layer_norm",
    rules.local_response_norm: "local_response_norm",
    shapes.copy: "contiguous clone",
    shapes.reshape: """view view_as reshape reshape_as flatten unflatten squeeze unsqueeze
        channel_shuffle native_channel_shuffle""",
    shapes.permute: "permute transpose swapaxes swapdims movedim moveaxis mT",
    shapes.expand: "expand expand_as",
    shapes.split: "chunk split split_with_sizes tensor_split",
    shapes.narrow: "narrow",
    shapes.unbind: "unbind",
    shapes.index: "__getitem__",
    shapes.concatenate: "cat concat concatenate",
}
_MOVES = (shapes.reshape, shapes.permute, shapes.copy)
_RULE_OF = {name: rule for rule, names in _RULES.items() for name in names.split()}


def masked_forward(
    net: nn.Module, inputs: Tensor | tuple[Tensor, ...], layers: Mapping[str, Layer]
) -> Any:
    """Run a network in training mode with masked output channels; return dense tensors.

    A layer is the path of a module with a `weight`, or of a parameter that the network passes to a
    functional convolution or linear map. Layers of one site share one mask.
    """
    sites = {id(_find_weight(net, path, layer)): layer for path, layer in layers.items()}
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    net.train()
    with _follow_modules(net, layers, sites):
        result = net(*(_wrap(Value(item), sites) for item in args))
    return tree_map(
        lambda item: to_dense(item.value) if isinstance(item, _MaskedTensor) else item, result
    )


@contextmanager
def _follow_modules(
    net: nn.Module, layers: Mapping[str, Layer], sites: dict[int, Layer]
) -> Iterator[None]:
    """Record which layer runs, as it may compute its weight."""
    modules, handles = dict(net.named_modules()), []
    for path, layer in layers.items():
        if path in modules:
            enter = partial(lambda layer, *_: sites.__setitem__(_RUNNING, layer), layer)
            handles.append(modules[path].register_forward_pre_hook(enter))
            leave = partial(lambda *_: sites.pop(_RUNNING) and None)
            handles.append(modules[path].register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _find_weight(net: nn.Module, path: str, layer: Layer) -> Tensor:
    parameters = dict(net.named_parameters(remove_duplicate=False))
    module = dict(net.named_modules()).get(path)
    weight = parameters.get(f"{path}.weight", parameters.get(path))
    if weight is None and isinstance(module, nn.Linear | _ConvNd):
        weight = max(module.parameters(), key=Tensor.numel)  # what it is computed from
    if weight is None:
        raise LookupError(f"Expected a layer or a parameter of the network, got {path!r}")
    is_mask = layer[1].dtype == torch.bool and layer[1].dim() == 1
    is_swapped = isinstance(module, nn.Embedding | _ConvTransposeNd)  # outputs come second
    sizes = weight.shape[:2] if module is None else weight.shape[is_swapped : is_swapped + 1]
    if not is_mask or all(size % len(layer[1]) for size in sizes):
        expected = f"Expected a bool mask over {weight.shape[0]} output channels of {path}"
        raise ValueError(f"{expected}, got {layer[1].dtype} of shape {tuple(layer[1].shape)}")
    return weight


class _MaskedTensor(Tensor):
    """A tensor without data that wraps a value and dispatches every operation to the rules."""

    value: Value
    sites: Mapping[int, Layer]

    @classmethod
    def __torch_function__(
        cls,
        func: Operation,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        sites = next(i for i in tree_leaves((args, kwargs)) if isinstance(i, _MaskedTensor)).sites
        if "input" in kwargs:
            args = (kwargs.pop("input"), *args)
        name = func.__name__
        if name == "__get__":  # a property: x.shape, x.mT
            name = func.__self__.__name__  # type: ignore[attr-defined]  # a bound descriptor
        target = args[0] if args else None
        if name == "__setitem__" and not isinstance(target, _MaskedTensor):
            raise NotImplementedError("a value of the network is written into a plain tensor")
        values, options = tree_map(_unwrap, (tuple(args), kwargs))
        is_in_place = bool(options.pop("inplace", False))
        if name.endswith("_") and not name.endswith("__"):
            is_in_place, name = True, name[:-1]
            func = _find_out_of_place(name) or _copy_first(func)
        elif name == "__setitem__":
            is_in_place, func = True, _copy_first(func)
        result = _dispatch(name, func, values, options, sites)
        if is_in_place and isinstance(target, _MaskedTensor):
            assert result.data.shape == target.value.data.shape
            target.value = result
            return target
        return tree_map(
            lambda item: _wrap(item, sites) if isinstance(item, Value) else item, result
        )


def _wrap(value: Value, sites: Mapping[int, Layer]) -> _MaskedTensor:
    tensor = Tensor._make_subclass(_MaskedTensor, torch.empty(value.data.shape, device="meta"))
    tensor.value, tensor.sites = value, sites
    return tensor


def _unwrap(item: Any) -> Any:
    return item.value if isinstance(item, _MaskedTensor) else item


def _find_out_of_place(name: str) -> Operation | None:
    modules = (torch.Tensor, F, torch)
    return next((getattr(module, name) for module in modules if hasattr(module, name)), None)


def _copy_first(func: Operation) -> Operation:
    def run_on_copy(target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copy = target.clone()
        func(copy, *args, **kwargs)
        return copy

    run_on_copy.__name__ = func.__name__
    return run_on_copy


def _dispatch(
    name: str,
    func: Operation,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sites: Mapping[int, Layer],
) -> Any:
    result: Result = None
    if name in ("conv1d", "conv2d", "conv3d", "linear"):
        result = _run_layer(name, func, bind_args(_LAYER_ARGS, args, kwargs), sites)
    elif name in ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"):
        result = _run_layer(name, func, bind_args(_TRANSPOSED_ARGS, args, kwargs), sites)
    elif name == "multi_head_attention_forward":
        return attention.multi_head_attention(func, args, kwargs, sites)
    elif name == "embedding":
        tokens, weight = args[0], args[1]
        if (layer := sites.get(id(weight))) is not None:
            data = func(tokens.data.long(), *args[1:], **kwargs)
            return attention.mask_outputs(data, data.ndim - 1, layer)
    else:
        rule = _RULE_OF.get(name)
        if rule not in _MOVES:
            args, kwargs = tree_map(_join_axes, (args, kwargs))
        if rule and any(isinstance(i, Value) and i.channels for i in tree_leaves((args, kwargs))):
            result = rule(func, args, kwargs)
    if result is not None:
        return result
    dense_args, options = tree_map(
        lambda i: to_dense(i) if isinstance(i, Value) else i, (args, kwargs)
    )
    return tree_map(
        lambda i: Value(i) if isinstance(i, Tensor) else i, func(*dense_args, **options)
    )


def _join_axes(item: Any) -> Any:
    is_split = isinstance(item, Value) and item.entries is not None
    return Value(to_dense(item)) if is_split else item


_LAYER_ARGS = "input weight bias stride padding dilation groups"
_TRANSPOSED_ARGS = "input weight bias stride padding output_padding groups dilation"


def _run_layer(
    name: str, func: Operation, kwargs: dict[str, Any], sites: Mapping[int, Layer]
) -> Value | None:
    """Apply pending factors and mask the output; a depthwise convolution follows its input."""
    value, weight, groups = kwargs["input"], kwargs["weight"], kwargs.get("groups", 1)
    layer = sites.get(id(weight), sites.get(_RUNNING))
    # a computed weight (a dynamic convolution) belongs to no layer
    if any(isinstance(item, Value) for key, item in kwargs.items() if key != "input"):
        return None
    if not isinstance(value, Value):
        return None
    axis = value.data.ndim - (1 if name == "linear" else 1 + int(name[-2]))
    is_depthwise = groups > 1 and groups == value.data.shape[axis] and "transpose" not in name
    if is_depthwise and value.axis == axis:
        data = func(**{**kwargs, "input": value.data})
        multiplier = data.shape[axis] // groups
        return mask_channels(data, axis, [c for c in value.channels for _ in range(multiplier)])
    data = func(**{**kwargs, "input": to_dense(value)})
    if layer is None:
        return Value(data)
    return attention.mask_outputs(data, axis, layer)
