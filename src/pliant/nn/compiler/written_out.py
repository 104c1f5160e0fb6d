"""Write attention modules out while they are traced, so that heads and hidden units get rules.

Torch computes a whole `nn.MultiheadAttention` in one function, in which heads and samples share an
axis. Here it becomes linear layers, reshapes and products with an axis of heads.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from pliant.nn.compiler.refusals import has_hooks

_ENCODERS = (nn.TransformerEncoder, nn.TransformerEncoderLayer)
_MASKS = ("mask", "src_mask")


def can_write_out(module: nn.Module, args: Any, kwargs: Any, traced: type) -> bool:
    """Return whether a call of an attention module is traced into."""
    if type(module) in _ENCODERS:
        masks = [*args[1:2], *(kwargs.get(name) for name in _MASKS)]
        # torch looks into masks, and in evaluation mode it takes another path
        return module.training and not any(isinstance(mask, traced) for mask in masks)
    if type(module) is not nn.MultiheadAttention or len(args) != 3:
        return False
    query, key, value = args
    is_self_attention = isinstance(query, traced) and query is key is value
    is_plain = module.bias_k is None and not module.add_zero_attn and not has_hooks(module.out_proj)
    mask: Any = kwargs.get("attn_mask")
    return (
        is_plain
        and is_self_attention
        and query.dim() == 3
        and (mask is None or mask.dim() == 2)
        and module.training
        and not has_hooks(module)
        and not parametrize.is_parametrized(module)
        and not parametrize.is_parametrized(module.out_proj)
    )


def write_out_attention(
    module: nn.MultiheadAttention,
    x: Any,
    *_: Any,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    """Compute self-attention step by step; the result is that of the module."""
    if not module.batch_first:
        x = x.transpose(0, 1)
    batch, length, width = x.shape
    heads, size = module.num_heads, module.head_dim
    projected = F.linear(x, module.in_proj_weight, module.in_proj_bias)
    parts = projected.reshape(batch, length, 3, heads, size).permute(2, 0, 3, 1, 4)
    query, key, value = parts[0], parts[1], parts[2]
    weights: Any = None
    if need_weights or attn_mask is not None or key_padding_mask is not None:
        scores = torch.matmul(query * size**-0.5, key.transpose(-2, -1))
        if attn_mask is not None:
            scores = _mask_scores(scores, attn_mask)
        if key_padding_mask is not None:
            scores = _mask_scores(scores, key_padding_mask.reshape(batch, 1, 1, length))
        weights = F.dropout(F.softmax(scores, dim=-1), module.dropout)
        mixed = torch.matmul(weights, value)
    else:
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=module.dropout)
    mixed = mixed.transpose(1, 2).reshape(batch, length, width)
    out = F.linear(mixed, module.out_proj.weight, module.out_proj.bias)
    if not module.batch_first:
        out = out.transpose(0, 1)
    if need_weights and average_attn_weights:
        weights = weights.mean(1)
        weights.node.meta["is_optional"] = True
    return out, weights if need_weights else None


def remove_unread(graph: fx.Graph) -> None:
    """Remove averages of attention weights that nothing reads."""
    for node in reversed(graph.nodes):
        if node.meta.get("is_optional") and not node.users:
            graph.erase_node(node)


def _mask_scores(scores: Any, mask: Any) -> Any:
    if mask.dtype == torch.bool:
        return scores.masked_fill(mask, -torch.inf)
    return scores.tracer.create_proxy("call_function", add_bias, (scores, mask), {})


def add_bias(scores: Tensor, mask: Tensor) -> Tensor:
    """Add the same numbers to the scores of all heads, present or not."""
    return scores + mask
