"""Networks and examples that are refused before or while they are traced, each in one line."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import is_lazy

_SIDES = ("length", "height, width", "depth, height, width")


class NotTraceable(ValueError):
    """A network that cannot be made elastic as it is."""

    path = ""  # of the module
    problem = ""


def check_example(example: Any) -> tuple[Tensor, ...]:
    """Return an example as a tuple of tensors with a batch dimension."""
    inputs = example if isinstance(example, tuple) else (example,)
    for item in inputs:
        if not isinstance(item, Tensor):
            raise ValueError(
                "Expected a tensor or a tuple of tensors as the example, "
                f"got {'a tuple with ' if isinstance(example, tuple) else ''}{_describe(item)}"
            )
    if not inputs or any(item.dim() < 2 for item in inputs):
        raise ValueError(
            "Expected an example input with a batch dimension, like torch.zeros(1, 3, 32, 32)"
        )
    return inputs


def _describe(item: Any) -> str:
    if type(item).__module__ == "numpy":
        return "a numpy array (use torch.from_numpy)"
    if isinstance(item, list):
        return "a list (use a tuple, with a tensor for each input)"
    return f"{type(item).__name__}"


def check_modules(net: nn.Module) -> None:
    """Refuse modules that hide their code or parameters, or that change gradients."""
    if not isinstance(net, nn.Module):
        raise ValueError(f"Expected an nn.Module, got {type(net).__name__}")
    for path, module in net.named_modules():
        name = path or type(net).__name__
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            raise NotTraceable(
                f"{name} is compiled by torch.compile: pass the network as it was before"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise NotTraceable(
                f"{name} is compiled by torch.jit: pass the network as it was before"
            )
        if any(is_lazy(tensor) for tensor in (*module._parameters.values(), *_buffers(module))):
            raise NotTraceable(
                f"{name} is a {type(module).__name__} without parameters so far: "
                "run the network once on an example first"
            )
        if (module._backward_hooks or module._backward_pre_hooks) and [*module.children()]:
            raise NotTraceable(f"{name} has a backward hook: remove it, or put it on a layer")
    for path, parameter in net.named_parameters():
        if parameter._backward_hooks:
            raise NotTraceable(
                f"{path} has a gradient hook, which subnets would not run: remove it"
            )


def _buffers(module: nn.Module) -> list[Any]:
    return [*module._buffers.values()]


def has_hooks(module: nn.Module) -> bool:
    """Return whether calling a module runs more than its `forward`."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def explain_wrong_shape(path: str, module: nn.Module, shape: tuple[int, ...], batch: int) -> str:
    """Say which input a convolution expects and which it got; empty if that is not the problem."""
    if not isinstance(module, _ConvNd):
        return ""
    dims = len(module.kernel_size)
    if len(shape) == dims + 2 and shape[1] == module.in_channels:
        return ""
    sizes = ", ".join("batch" if size == batch else str(size) for size in shape)
    example = ", ".join(map(str, (1, module.in_channels, *[32] * dims)))
    kind = "transposed convolution" if isinstance(module, _ConvTransposeNd) else "convolution"
    advice = f"; the example for a network that starts with it is like torch.zeros({example})"
    return (
        f"{path} is a {kind} of inputs (batch, {module.in_channels}, {_SIDES[dims - 1]}), "
        f"got ({sizes}){advice}"
    )


def copy_module(net: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Copy a module, even if a forward pass has left computed tensors in its attributes."""
    memo = (memo or {}) | {
        id(value): value.detach().clone()
        for module in net.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    return copy.deepcopy(net, memo)


def copy_to_meta(net: nn.Module) -> nn.Module:
    """Copy a module to the meta device without copying its data."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        for parameter in net.parameters()
    }
    memo |= {id(buffer): buffer.detach().to("meta") for buffer in net.buffers()}
    return copy_module(net, memo)
