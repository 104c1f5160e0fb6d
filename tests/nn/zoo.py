"""Small networks of many architectures for tests of elastic networks.

`ZOO` maps a name to a function that makes a network and an example batch of 4, in float64.
`UNTRACEABLE` holds networks with data-dependent control flow. All parameters get noise, even the
ones and zeros of norm layers, to reveal leaks through a mask.
"""

from collections.abc import Callable

import torch
from tests.nn import zoo_classic as classic
from tests.nn import zoo_odd as odd
from torch import Tensor, nn

NetworkFn = Callable[[], tuple[nn.Module, Tensor]]


def _make_member(make: Callable[[], nn.Module], *shape: int) -> NetworkFn:
    def build() -> tuple[nn.Module, Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = make().double().train()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(0.3 * torch.randn_like(parameter))
            return net, torch.randn(4, *(shape or (3, 8, 8)), dtype=torch.float64)

    return build


ZOO: dict[str, NetworkFn] = {
    "plain": _make_member(classic.Plain),
    "projected_residual": _make_member(classic.ProjectedResidual),
    "pre_activation": _make_member(classic.PreActivation),
    "identity_residual": _make_member(classic.IdentityResidual),
    "padded_shortcut": _make_member(odd.PaddedShortcut),
    "dense": _make_member(classic.Dense),
    "inception": _make_member(classic.Inception),
    "depthwise_separable": _make_member(classic.DepthwiseSeparable),
    "depthwise_multiplier": _make_member(classic.DepthwiseMultiplier),
    "squeeze_excite": _make_member(classic.SqueezeExcite),
    "linear_squeeze_excite": _make_member(classic.LinearSqueezeExcite),
    "grouped": _make_member(classic.Grouped),
    "channel_shuffle": _make_member(classic.ChannelShuffle),
    "convnext": _make_member(classic.ConvNext),
    "signal": _make_member(classic.Signal, 2, 24),
    "volume": _make_member(classic.Volume, 2, 4, 4, 4),
    "functional": _make_member(odd.Functional),
    "slice_addition": _make_member(odd.SliceAddition),
    "slice_spread": _make_member(odd.SliceSpread),
    "shared_twice": _make_member(odd.SharedTwice),
    "shared_apart": _make_member(odd.SharedApart),
    "auxiliary": _make_member(odd.Auxiliary),
    "written_out_swish": _make_member(odd.WrittenOutSwish),
    "conv_classifier": _make_member(odd.ConvClassifier),
    "group_norms": _make_member(odd.GroupNorms),
    "layer_norms": _make_member(odd.LayerNorms),
    "tokens": _make_member(odd.Tokens),
    "local_response": _make_member(odd.LocalResponse),
    "unknown": _make_member(odd.Unknown),
    "spatial_attention": _make_member(odd.SpatialAttention),
    "channel_attention": _make_member(odd.ChannelAttention),
    "learned_scale": _make_member(odd.LearnedScale),
    "per_channel_slopes": _make_member(odd.PerChannelSlopes),
    "in_place": _make_member(odd.InPlace),
    "two_draw_product": _make_member(odd.TwoDrawProduct),
    "two_draw_sum": _make_member(odd.TwoDrawSum),
}

UNTRACEABLE: dict[str, NetworkFn] = {
    "branch_on_sum": _make_member(odd.BranchOnSum),
    "loop_on_maximum": _make_member(odd.LoopOnMaximum),
    "while_large": _make_member(odd.WhileLarge),
}
