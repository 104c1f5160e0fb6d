"""Layers of torch whose weights are computed by its own tools, and which are traced into."""

from typing import Any

from torch import nn
from torch.nn.utils import parametrize

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_PARAMETRIZATIONS = {"_WeightNorm", "_SpectralNorm"}  # of torch.nn.utils.parametrizations
_HOOKS = {"WeightNorm", "SpectralNorm"}  # of torch.nn.utils


def is_traced_into(module: nn.Module) -> bool:
    """Return whether a module of torch computes the weight of a layer in a way that is traced."""
    if type(module).__module__ == "torch.nn.utils.parametrizations":
        return type(module).__name__ in _PARAMETRIZATIONS
    if isinstance(module, parametrize.ParametrizationList):
        return all(is_traced_into(part) for part in module.children())
    if not isinstance(module, (*_LAYERS, *_TRANSPOSED)) or not _has_known_hooks(module):
        return False
    if parametrize.is_parametrized(module):
        lists: Any = module.parametrizations
        return all(is_traced_into(parts) for parts in lists.values())
    return bool(module._forward_pre_hooks)


def _has_known_hooks(module: nn.Module) -> bool:
    others = (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    hooks = module._forward_pre_hooks.values()
    return not any(others) and all(
        type(hook).__module__.startswith("torch.nn.utils.") and type(hook).__name__ in _HOOKS
        for hook in hooks
    )
