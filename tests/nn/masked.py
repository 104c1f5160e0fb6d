"""The oracle of the elastic law: any network, run eagerly at full size with masks.

It shares nothing with the compact pass: no trace, no kept index. Every value of the network's own
`forward` is a full-size tensor that knows of each of its channels whether it is there, whose draw
decided that, and which factors are still owed. An operation without a rule gets the dense value:
absent channels as zeros, all factors paid.

Not modelled: an in-place operation on a view does not reach the tensor that was viewed. A value
that escapes (into a custom `autograd.Function`, say) has no data and fails: nothing passes unseen.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import masked_rules as rules
import masked_shapes as shapes
import torch
import torch.nn.functional as F
from masked_rules import Channel, Operation, Outcome, Value, bound, carry, dense
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

Layer = tuple[int, Tensor, float]  # site id, which output channels are there, scale 1/q
Rule = Callable[[Operation, Sequence[Any], dict[str, Any]], Outcome]

_RULES: dict[Rule, str] = {
    rules.arithmetic: """add sub subtract mul multiply div divide true_divide pow __radd__ __rsub__
        __rmul__ __rdiv__ __rtruediv__ __rpow__""",
    rules.elementwise: """relu relu6 sigmoid tanh gelu silu hardswish hardsigmoid hardtanh
        leaky_relu elu selu celu softplus softsign mish tanhshrink hardshrink softshrink logsigmoid
        log_sigmoid threshold _threshold rrelu dropout dropout1d dropout2d dropout3d alpha_dropout
        feature_alpha_dropout feature_dropout exp expm1 log log1p sqrt rsqrt square abs neg negative
        reciprocal sin cos erf sign clamp clamp_min clamp_max clip contiguous clone detach to float
        double half bfloat16 type type_as""",
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
    shapes.reshape: "view view_as reshape reshape_as flatten unflatten squeeze unsqueeze",
    shapes.permute: "permute transpose swapaxes swapdims movedim moveaxis mT",
    shapes.expand: "expand expand_as",
    shapes.part: "chunk split split_with_sizes tensor_split",
    shapes.narrow: "narrow",
    shapes.index: "__getitem__",
    shapes.join: "cat concat concatenate",
}
_RULE_OF = {name: rule for rule, names in _RULES.items() for name in names.split()}


def masked_forward(
    net: nn.Module, inputs: Tensor | tuple[Tensor, ...], layers: Mapping[str, Layer]
) -> Any:
    """Run a network in training mode with only these output channels of these layers.

    A layer is the path of a module that owns a `weight`, or of a parameter that the network itself
    hands to a functional convolution or linear map. Layers of one site share one mask. The answer
    has the network's structure, with plain dense tensors.
    """
    sites = {id(_weight(net, path, layer)): layer for path, layer in layers.items()}
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    net.train()
    result = net(*(_shell(Value(item), sites) for item in given))
    return tree_map(lambda item: dense(item.value) if isinstance(item, _Shell) else item, result)


def _weight(net: nn.Module, path: str, layer: Layer) -> Tensor:
    parameters = dict(net.named_parameters(remove_duplicate=False))
    weight = parameters.get(f"{path}.weight", parameters.get(path))
    if weight is None:
        raise LookupError(f"Expected a layer or a parameter of the network, got {path!r}")
    if layer[1].dtype != torch.bool or layer[1].shape != weight.shape[:1]:
        wanted = f"Expected a bool mask over {weight.shape[0]} output channels of {path}"
        raise ValueError(f"{wanted}, got {layer[1].dtype} of shape {tuple(layer[1].shape)}")
    return weight


class _Shell(Tensor):
    """A tensor without data in front of a value: every operation on it comes to the rules."""

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
        sites = next(i for i in tree_leaves((args, kwargs)) if isinstance(i, _Shell)).sites
        if "input" in kwargs:
            args = (kwargs.pop("input"), *args)
        name = func.__name__
        if name == "__get__":  # a property: x.shape, x.mT
            name = func.__self__.__name__  # type: ignore[attr-defined]  # a bound descriptor
        target = args[0] if args else None
        if name == "__setitem__" and not isinstance(target, _Shell):
            raise NotImplementedError("a value of the network is written into a plain tensor")
        values, options = tree_map(_opened, (tuple(args), kwargs))
        is_inplace = bool(options.pop("inplace", False))
        if name.endswith("_") and not name.endswith("__"):
            is_inplace, name = True, name[:-1]
            func = _out_of_place(name) or _on_a_copy(func)
        elif name == "__setitem__":
            is_inplace, func = True, _on_a_copy(func)
        outcome = _outcome(name, func, values, options, sites)
        if is_inplace and isinstance(target, _Shell):
            assert outcome.data.shape == target.value.data.shape
            target.value = outcome
            return target
        return tree_map(
            lambda item: _shell(item, sites) if isinstance(item, Value) else item, outcome
        )


def _shell(value: Value, sites: Mapping[int, Layer]) -> _Shell:
    shell = Tensor._make_subclass(_Shell, torch.empty(value.data.shape, device="meta"))
    shell.value, shell.sites = value, sites
    return shell


def _opened(item: Any) -> Any:
    return item.value if isinstance(item, _Shell) else item


def _out_of_place(name: str) -> Operation | None:
    homes = (torch.Tensor, F, torch)
    return next((getattr(home, name) for home in homes if hasattr(home, name)), None)


def _on_a_copy(func: Operation) -> Operation:
    def changed(target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copy = target.clone()
        func(copy, *args, **kwargs)
        return copy

    changed.__name__ = func.__name__
    return changed


def _outcome(
    name: str,
    func: Operation,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sites: Mapping[int, Layer],
) -> Any:
    outcome: Outcome = None
    if name in ("conv1d", "conv2d", "conv3d", "linear"):
        outcome = _layer(name, func, bound(_ORDER, args, kwargs), sites)
    elif any(isinstance(i, Value) and i.axis is not None for i in tree_leaves((args, kwargs))):
        rule = _RULE_OF.get(name)
        outcome = rule(func, args, kwargs) if rule else None
    if outcome is not None:
        return outcome
    paid, options = tree_map(lambda i: dense(i) if isinstance(i, Value) else i, (args, kwargs))
    return tree_map(lambda i: Value(i) if isinstance(i, Tensor) else i, func(*paid, **options))


_ORDER = "input weight bias stride padding dilation groups"


def _layer(
    name: str, func: Operation, named: dict[str, Any], sites: Mapping[int, Layer]
) -> Value | None:
    """Pay for the input and draw the output; a depthwise convolution follows its input."""
    value, weight, groups = named["input"], named["weight"], named.get("groups", 1)
    layer = sites.get(id(weight))
    if layer is not None and groups > 1:
        raise ValueError(f"Expected a layer without groups, got one with {groups}")
    # a value as weight (a dynamic convolution) is nobody's layer
    if any(isinstance(item, Value) for key, item in named.items() if key != "input"):
        return None
    if not isinstance(value, Value):
        return None
    axis = value.data.ndim - (1 if name == "linear" else 1 + int(name[-2]))
    if groups > 1 and groups == value.data.shape[axis] and value.axis == axis:
        data = func(**{**named, "input": value.data})
        times = data.shape[axis] // groups
        return carry(data, axis, [c for c in value.channels for _ in range(times)])
    data = func(**{**named, "input": dense(value)})
    if layer is None:
        return Value(data)
    site, mask, scale = layer
    owed = frozenset({(site, float(scale))})
    there = mask.tolist()
    return carry(data, axis, [Channel(p, ("site", site, c), owed) for c, p in enumerate(there)])
