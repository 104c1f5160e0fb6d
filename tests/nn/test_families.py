"""The law on eighty architectures: a compact pass is the full-size pass with masks.

Output, gradients and buffers agree with the oracle of `tests.nn.masked`, and MACs are those that
torch counts.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests.nn.compare_masked import assert_close, run_compact, run_masked
from tests.nn.families import image, modern, normed, other, transformer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

from pliant.nn.elastic import Elastic, elastic
from pliant.nn.subnet import Subnet
from pliant.params import get_params
from pliant.rng import rng_stream

IMAGE, SIGNAL, CLIP, TEXT = (3, 8, 8), (2, 12), (2, 4, 6, 6), (9,)
Make = Callable[[], nn.Module]

FAMILIES: dict[str, tuple[Make, tuple[int, ...]]] = {
    "resnet_basic": (image.make_basic_resnet, (3, 16, 16)),
    "resnet_bottleneck": (image.make_bottleneck_resnet, IMAGE),
    "resnet_pre_activation": (image.make_pre_activation_resnet, IMAGE),
    "vgg": (image.make_vgg, IMAGE),
    "alexnet": (image.make_alexnet, (3, 16, 16)),
    "densenet": (image.make_densenet, IMAGE),
    "mobilenet_v1": (image.make_mobilenet_v1, IMAGE),
    "mobilenet_v2": (partial(image.make_inverted, nn.ReLU6), IMAGE),
    "mobilenet_v3": (partial(image.make_inverted, nn.Hardswish, 3), IMAGE),
    "mnasnet": (partial(image.make_inverted, nn.ReLU), IMAGE),
    "efficientnet": (partial(image.make_inverted, nn.SiLU, 3), IMAGE),
    "shufflenet": (image.make_shufflenet, IMAGE),
    "googlenet": (image.GoogLeNet, IMAGE),
    "squeezenet": (image.make_squeezenet, IMAGE),
    "regnet": (image.make_regnet, IMAGE),
    "resnext": (image.make_resnext, IMAGE),
    "resnext_many_groups": (partial(image.make_resnext, 12, 6), IMAGE),
    "grouped_stack": (image.make_grouped_stack, IMAGE),
    "convnext": (image.make_convnext, IMAGE),
    "repvgg": (modern.make_repvgg, IMAGE),
    "ghostnet": (modern.make_ghostnet, IMAGE),
    "convmixer": (modern.make_convmixer, IMAGE),
    "poolformer": (modern.make_poolformer, IMAGE),
    "cspnet": (modern.make_cspnet, IMAGE),
    "res2net": (modern.make_res2net, IMAGE),
    "hrnet": (modern.HighResolution, IMAGE),
    "dual_path": (modern.make_dual_path, IMAGE),
    "layer_aggregation": (modern.make_layer_aggregation, IMAGE),
    "pyramidnet": (modern.Pyramid, IMAGE),
    "cbam": (modern.make_attentive, IMAGE),
    "selective_kernels": (modern.make_selective, IMAGE),
    "maxout": (modern.make_maxout, IMAGE),
    "unet_transposed": (partial(other.UNet, is_transposed=True), IMAGE),
    "unet_interpolated": (partial(other.UNet, is_transposed=False), IMAGE),
    "autoencoder": (other.make_autoencoder, IMAGE),
    "dcgan": (other.make_generator, (5, 1, 1)),
    "signal_decoder": (other.SignalDecoder, SIGNAL),
    "unet_attention": (other.AttentionUNet, IMAGE),
    "feature_pyramid": (other.Pyramid, IMAGE),
    "audio_cnn": (other.make_audio_cnn, (1, 64)),
    "wavenet": (other.WaveNet, SIGNAL),
    "temporal": (other.Temporal, SIGNAL),
    "video_cnn": (other.make_video_cnn, CLIP),
    "video_factorised": (other.FactorisedVideo, CLIP),
    "video_pathways": (other.TwoPathways, CLIP),
    "conv_lstm_head": (partial(other.ConvRecurrent, nn.LSTM), IMAGE),
    "conv_gru_head": (partial(other.ConvRecurrent, nn.GRU), IMAGE),
    "convolutional_lstm": (other.ConvLSTM, CLIP),
    "vision_transformer": (other.VisionTransformer, IMAGE),
    "non_local": (other.NonLocal, IMAGE),
    "linear_attention": (other.LinearAttention, IMAGE),
    "mixer": (other.Mixer, IMAGE),
    **{
        f"transformer_{attend.__name__.removeprefix('attend_')}": (
            partial(transformer.ImageTransformer, attend),
            IMAGE,
        )
        for attend in (
            transformer.attend_by_module,
            transformer.attend_without_weights,
            transformer.attend_to_others,
            transformer.attend_like_timm,
            transformer.attend_like_gpt,
            transformer.attend_by_layers,
        )
    },
    "encoder": (
        partial(transformer.TextTransformer, batch_first=True, norm_first=True),
        TEXT,
    ),
    "encoder_post_norm": (
        partial(transformer.TextTransformer, batch_first=False, norm_first=False),
        TEXT,
    ),
    "padded_text": (transformer.PaddedText, TEXT),
    "text_cnn": (transformer.TextCnn, TEXT),
    "tied_text": (transformer.TiedText, TEXT),
    "convnext_channel_norm": (partial(normed.make_convnext, normed.ChannelNorm), IMAGE),
    "convnext_root_norm": (partial(normed.make_convnext, normed.RootNorm), IMAGE),
    "shufflenet_v1": (normed.make_grouped_shuffle, IMAGE),
    "shufflenet_v2": (partial(normed.make_shufflenet, normed.shuffle_like_torchvision), IMAGE),
    "shufflenet_permuted": (partial(normed.make_shufflenet, normed.shuffle_by_permuting), IMAGE),
    "shufflenet_by_torch": (partial(normed.make_shufflenet, F.channel_shuffle), IMAGE),
    "weight_norm": (partial(normed.make_normed, parametrizations.weight_norm), IMAGE),
    "weight_norm_by_hook": (partial(normed.make_normed, normed.norm_by_hook("weight_norm")), IMAGE),
    "spectral_norm": (partial(normed.make_normed, parametrizations.spectral_norm), IMAGE),
    "spectral_norm_by_hook": (
        partial(normed.make_normed, normed.norm_by_hook("spectral_norm")),
        IMAGE,
    ),
    "weight_norm_signal": (normed.make_normed_signal, SIGNAL),
    "weight_standardised": (normed.make_standardised, IMAGE),
    "siamese": (normed.Siamese, IMAGE),
    "shared_head": (normed.SharedHead, IMAGE),
    "instance_norm_tracked": (normed.make_style, IMAGE),
    "synchronised_norm": (normed.make_synchronised, IMAGE),
    "text_lstm": (partial(normed.TextRecurrent, nn.LSTM), TEXT),
    "text_rnn": (partial(normed.TextRecurrent, nn.RNN), TEXT),
    "speech_gru": (normed.SpeechRecurrent, SIGNAL),
}
# the same networks in operations that the oracle knows
TWINS: dict[str, Make] = {
    "convnext_channel_norm": partial(normed.make_convnext, normed.ChannelNorm, is_plain=True),
    "convnext_root_norm": partial(normed.make_convnext, normed.RootNorm, is_plain=True),
}


def make_member(name: str, make: Make) -> tuple[nn.Module, Tensor]:
    shape = FAMILIES[name][1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = make().double().train()
        with torch.no_grad():  # even the ones and zeros of norms, to reveal leaks through a mask
            for parameter in module.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        if shape == TEXT:
            return module, torch.randint(0, 20, (3, *shape))
        return module, torch.randn(3, *shape, dtype=torch.float64)


def sample_subnets(net: Elastic) -> list[Subnet]:
    rng = rng_stream(0, "families")
    rates = rng.uniform(0.2, 0.7, len(net.sites))
    orders = net.sample_orders(rng)
    return [
        net.full,
        net.draw(rates, rng, "bernoulli"),
        net.select_prefix(rates, orders, rescale=True),
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_compact_pass_is_the_full_size_pass_with_masks(name: str) -> None:
    module, x = make_member(name, FAMILIES[name][0])
    twin, _ = make_member(name, TWINS[name]) if name in TWINS else (module, x)
    net, params = elastic(module, x), get_params(module)
    assert net.sites or net.full_layers
    for subnet in sample_subnets(net):
        # torch does not count its fused attention on CPUs
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            net.run(net.take(params, subnet), subnet, x)
        assert counter.get_total_flops() == 2 * len(x) * net.macs(subnet)
        torch.manual_seed(1)  # of stochastic depth
        outputs, tensors = run_compact(net, params, subnet, x)
        torch.manual_seed(1)
        masked_outputs, masked_tensors = run_masked(net, twin, subnet, x)
        for index, (compact, masked) in enumerate(zip(outputs, masked_outputs, strict=True)):
            assert_close(compact, masked, f"output {index}")
        for tensor in tensors:
            assert_close(tensors[tensor], masked_tensors[tensor], tensor)
