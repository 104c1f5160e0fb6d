"""What networks do beyond layers, and what becomes of it: narrowed, dense or refused.

`scripts/support_table.py` writes docs/support.md from these cases.
"""

from functools import partial

import numpy as np
import torch
from tests.nn import support as nets
from tests.nn.families import normed, transformer
from tests.nn.families.transformer import ImageTransformer
from tests.nn.support import Case, add_hook, between, make_quietly, replace_body
from torch import nn
from torch.nn.utils import parametrizations

CASES = (
    # gradients
    between(
        "a custom `torch.autograd.Function`",
        "dense",
        lambda n, x: nets.Square.apply(n.body(x)),
        "Square mixes channels",
    ),
    between(
        "`checkpoint(..., use_reentrant=True)`",
        "narrowed",
        lambda n, x: nets.run_checkpoint(n, x, use_reentrant=True),
    ),
    between(
        "`checkpoint(..., use_reentrant=False)`",
        "narrowed",
        lambda n, x: nets.run_checkpoint(n, x, use_reentrant=False),
    ),
    between(
        "reading `requires_grad`",
        "narrowed",
        lambda n, x: n.body(x) if x.requires_grad and n.stem.weight.requires_grad else x,
    ),
    # modes
    Case("batch norm in evaluation mode (frozen)", "narrowed", nets.freeze_norm),
    Case("dropout in evaluation mode (off)", "narrowed", nets.switch_dropout_off),
    # hooks
    Case(
        "a forward hook on a layer",
        "dense",
        lambda: add_hook("forward", "body"),
        "full: body: it has hooks",
    ),
    Case(
        "a forward pre-hook on a layer",
        "dense",
        lambda: add_hook("before", "body"),
        "full: body: it has hooks",
    ),
    Case("a forward hook on the network", "narrowed", lambda: add_hook("forward", "")),
    Case("a forward pre-hook on the network", "narrowed", lambda: add_hook("before", "")),
    Case(
        "a backward hook on the network",
        "refused",
        lambda: add_hook("backward", ""),
        "Body has a backward hook",
    ),
    Case(
        "a gradient hook on a parameter",
        "refused",
        lambda: add_hook("gradient", "body"),
        "body.weight has a gradient hook",
    ),
    # writes in place
    between("writing in place to half of a value", "narrowed", nets.write_to_half),
    between(
        "writing in place through a view, then reading the base",
        "refused",
        nets.write_through_view,
        "writes in place (mul_)",
    ),
    between(
        "writing in place to the base, then reading a view",
        "refused",
        nets.write_under_view,
        "writes in place (mul_)",
    ),
    between(
        "assigning to a part of a tensor",
        "refused",
        nets.assign_part,
        "Use torch.cat or torch.where",
    ),
    # precision, randomness, counters
    between(
        "`torch.autocast` inside forward",
        "refused",
        nets.run_autocast,
        "torch.autocast inside forward",
    ),
    between("`torch.rand(1)`", "narrowed", nets.draw_one),
    between("stochastic depth per sample", "narrowed", nets.drop_samples),
    between(
        "`random.random()` in a branch",
        "refused",
        nets.drop_path,
        "Body draws from random in forward",
    ),
    between(
        "`numpy.random`",
        "refused",
        lambda n, x: x * np.random.rand(),
        "Body draws from numpy.random",
    ),
    between(
        "a branch on `torch.rand(1)`",
        "refused",
        lambda n, x: x if torch.rand(1) < 0.5 else -x,
        "a branch on the value of a tensor",
    ),
    between(
        "a counter that changes the result",
        "refused",
        nets.count_steps,
        "Body computes something else in its second pass",
    ),
    between("a counter that does not", "narrowed", nets.count_calls),
    # assignments to `self`
    between("caching activations or losses on `self`", "narrowed", nets.cache_features),
    between("assigning to a buffer", "narrowed", nets.average_in_buffer),
    between("updating a buffer in place", "narrowed", nets.average_in_place),
    # layers
    Case(
        "`parametrizations.weight_norm`",
        "narrowed",
        lambda: replace_body(lambda: parametrizations.weight_norm(nets.make_conv())),
    ),
    Case(
        "`parametrizations.spectral_norm`",
        "narrowed",
        lambda: replace_body(lambda: parametrizations.spectral_norm(nets.make_conv())),
    ),
    Case(
        "another parametrization",
        "dense",
        lambda: replace_body(lambda: nets.parametrize_own(nets.make_conv())),
        "full: body: its parameters are computed by torch.nn.utils.parametrize",
    ),
    Case(
        "`nn.utils.weight_norm`",
        "narrowed",
        lambda: replace_body(lambda: nn.utils.weight_norm(nets.make_conv())),
    ),
    Case(
        "`nn.utils.spectral_norm`",
        "narrowed",
        lambda: replace_body(lambda: nn.utils.spectral_norm(nets.make_conv())),
    ),
    Case(
        "a weight-standardised convolution",
        "narrowed",
        lambda: replace_body(lambda: nets.StandardisedConv(6, 6, 1)),
    ),
    Case(
        "a transposed convolution",
        "narrowed",
        lambda: replace_body(lambda: nn.ConvTranspose2d(6, 6, 2)),
    ),
    Case(
        "a transposed convolution with groups",
        "dense",
        lambda: replace_body(lambda: nn.ConvTranspose2d(6, 6, 2, groups=2)),
        "full: body: a transposed convolution with groups has no rule",
    ),
    Case(
        "a convolution with groups",
        "narrowed",
        lambda: replace_body(lambda: nn.Conv2d(6, 6, 1, groups=2)),
    ),
    Case(
        "a depthwise convolution",
        "narrowed",
        lambda: replace_body(lambda: nn.Conv2d(6, 6, 3, groups=6)),
        "full: body: a depthwise convolution keeps the filters",
    ),
    between("a convolution applied twice, to other channels", "narrowed", nets.share_body, last=12),
    between(
        "a channel shuffle by `view` and `transpose`",
        "narrowed",
        lambda n, x: normed.shuffle_like_torchvision(n.body(x), 2),
    ),
    Case("`nn.ChannelShuffle`", "narrowed", lambda: replace_body(lambda: nn.ChannelShuffle(3))),
    Case(
        "a layer norm over channels, written out",
        "narrowed",
        lambda: replace_body(lambda: normed.ChannelNorm(6, is_plain=False)),
    ),
    between(
        "torchvision's `stochastic_depth`",
        "narrowed",
        lambda n, x: x + normed.stochastic_depth(n.body(x), 0.2, "row"),
    ),
    Case(
        "instance norm that tracks statistics",
        "narrowed",
        lambda: replace_body(lambda: nn.InstanceNorm2d(6, track_running_stats=True)),
    ),
    Case(
        "`nn.SyncBatchNorm`, as the batch norm of one device",
        "narrowed",
        lambda: replace_body(lambda: nn.SyncBatchNorm(6)),
    ),
    *(
        Case(
            f"the inputs of `nn.{cell.__name__}`",
            "narrowed",
            partial(nets.Recurrent, cell),
            "full: cell: a recurrent layer keeps all hidden units",
        )
        for cell in (nn.LSTM, nn.GRU)
    ),
    between(
        "`x[:, :, None, None]`",
        "narrowed",
        lambda n, x: x * n.body(x).mean((2, 3)).sigmoid()[:, :, None, None],
    ),
    # transformers, with a class token joined by `cat`
    Case(
        "`nn.MultiheadAttention` of a value with itself",
        "narrowed",
        lambda: ImageTransformer(transformer.attend_by_module),
    ),
    Case(
        "`nn.MultiheadAttention` of two values",
        "dense",
        lambda: ImageTransformer(transformer.attend_to_others),
        "MultiheadAttention mixes channels",
    ),
    Case(
        "`scaled_dot_product_attention`, with heads by `view`",
        "narrowed",
        lambda: ImageTransformer(transformer.attend_like_gpt),
    ),
    Case(
        "attention written with `@` and `softmax`",
        "narrowed",
        lambda: ImageTransformer(transformer.attend_like_timm),
    ),
    Case(
        "a lazy module before its first run",
        "refused",
        lambda: nn.Sequential(nn.LazyConv2d(4, 3)),
        "0 is a LazyConv2d without parameters so far",
    ),
    # other tools
    Case(
        "`torch.compile`",
        "refused",
        lambda: make_quietly(lambda: torch.compile(nets.Body())),
        "compiled by torch.compile",
    ),
    Case(
        "a part under `torch.compile`",
        "refused",
        lambda: replace_body(lambda: torch.compile(nets.make_conv())),
        "body is compiled by torch.compile",
    ),
    Case("`torch.jit`", "refused", nets.make_jit, "1 is compiled by torch.jit"),
    between(
        "a library that checks for tensors (einops)",
        "refused",
        lambda n, x: nets.rearrange(x),
        "mark the function with torch.fx.wrap",
    ),
    between(
        "the same, marked with `torch.fx.wrap`",
        "dense",
        lambda n, x: nets.wrapped_rearrange(n.body(x)),
        "wrapped_rearrange mixes channels",
    ),
    # values and results
    between(
        "`x.var((2, 3), False, True)` and other positional `keepdim`",
        "narrowed",
        nets.divide_by_variance,
    ),
    Case("a dataclass as the output", "narrowed", lambda: nets.Returning(nets.Result)),
    Case("a named tuple as the output", "narrowed", lambda: nets.Returning(nets.Pair)),
    between(
        "a branch on a value",
        "refused",
        lambda n, x: x if x.sum() > 0 else -x,
        "a branch on the value of a tensor",
    ),
)
