"""Small networks of many architectures, on which the elastic law is tried.

`ZOO` maps a name to a function that makes the network and an example batch of 4, in float64;
`REFUSED` holds networks whose path depends on the data. All parameters are noisy (a norm layer's
scale and bias too, which start as ones and zeros), so that what leaks through a mask shows.
"""

from collections.abc import Callable

import torch
import zoo_classic as classic
import zoo_odd as odd
from torch import Tensor, nn

Member = Callable[[], tuple[nn.Module, Tensor]]


def _member(make: Callable[[], nn.Module], *shape: int) -> Member:
    def built() -> tuple[nn.Module, Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = make().double().train()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(0.3 * torch.randn_like(parameter))
            return net, torch.randn(4, *(shape or (3, 8, 8)), dtype=torch.float64)

    return built


ZOO: dict[str, Member] = {
    "plain": _member(classic.Plain),
    "projected_residual": _member(classic.ProjectedResidual),
    "pre_activation": _member(classic.PreActivation),
    "identity_residual": _member(classic.IdentityResidual),
    "padded_shortcut": _member(odd.PaddedShortcut),
    "dense": _member(classic.Dense),
    "inception": _member(classic.Inception),
    "depthwise_separable": _member(classic.DepthwiseSeparable),
    "depthwise_multiplier": _member(classic.DepthwiseMultiplier),
    "squeeze_excite": _member(classic.SqueezeExcite),
    "linear_squeeze_excite": _member(classic.LinearSqueezeExcite),
    "grouped": _member(classic.Grouped),
    "channel_shuffle": _member(classic.ChannelShuffle),
    "convnext": _member(classic.ConvNext),
    "signal": _member(classic.Signal, 2, 24),
    "volume": _member(classic.Volume, 2, 4, 4, 4),
    "functional": _member(odd.Functional),
    "slice_addition": _member(odd.SliceAddition),
    "slice_spread": _member(odd.SliceSpread),
    "shared_twice": _member(odd.SharedTwice),
    "shared_apart": _member(odd.SharedApart),
    "auxiliary": _member(odd.Auxiliary),
    "written_out_swish": _member(odd.WrittenOutSwish),
    "conv_classifier": _member(odd.ConvClassifier),
    "group_norms": _member(odd.GroupNorms),
    "layer_norms": _member(odd.LayerNorms),
    "tokens": _member(odd.Tokens),
    "local_response": _member(odd.LocalResponse),
    "unknown": _member(odd.Unknown),
    "spatial_attention": _member(odd.SpatialAttention),
    "channel_attention": _member(odd.ChannelAttention),
    "learned_scale": _member(odd.LearnedScale),
    "per_channel_slopes": _member(odd.PerChannelSlopes),
    "in_place": _member(odd.InPlace),
    "two_draw_product": _member(odd.TwoDrawProduct),
    "two_draw_sum": _member(odd.TwoDrawSum),
}

REFUSED: dict[str, Member] = {
    "branch_on_sum": _member(odd.BranchOnSum),
    "loop_on_maximum": _member(odd.LoopOnMaximum),
    "while_large": _member(odd.WhileLarge),
}
