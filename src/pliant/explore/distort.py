"""Distorted images: data for the snapshot that looks like the real thing and is not.

Rapp et al., DISTREAL, AAAI 2022: brightness, contrast and saturation times 0.5.
"""

from dataclasses import replace

import torch
from torch import Tensor

from pliant.data import Images
from pliant.rng import stream
from pliant.value import NonNegative, Value

LUMA = (0.299, 0.587, 0.114)  # of red, green and blue, ITU-R BT.601


class Distortion(Value, frozen=True):
    """Factors for colour images; grey ones get contrast and noise, for they have no saturation."""

    brightness: NonNegative = 0.5
    contrast: NonNegative = 0.5
    saturation: NonNegative = 0.5
    noise: NonNegative = 0.1  # standard deviation, in parts of the range of pixels


def distorted(images: Images, how: Distortion, seed: int) -> Images:
    """Return new images of the same kind."""
    is_bytes = images.pixels.dtype == torch.uint8
    pixels = images.pixels.to(torch.float32)
    if images.shape[0] == 3:
        pixels = _saturated(_contrasted(pixels * how.brightness, how.contrast), how.saturation)
    else:
        unit = 255.0 if is_bytes else float(pixels.max() - pixels.min())
        drawn = stream(seed, "distortion").standard_normal(pixels.shape, dtype="float32")
        pixels = _contrasted(pixels, how.contrast) + how.noise * unit * torch.from_numpy(drawn)
    if is_bytes:
        pixels = pixels.round().clamp_(0, 255).to(torch.uint8)
    return replace(images, pixels=pixels, name=f"{images.name}, distorted")


def _contrasted(pixels: Tensor, factor: float) -> Tensor:
    mean = _grey(pixels).mean(dim=(1, 2, 3), keepdim=True)
    return mean + factor * (pixels - mean)


def _saturated(pixels: Tensor, factor: float) -> Tensor:
    grey = _grey(pixels)
    return grey + factor * (pixels - grey)


def _grey(pixels: Tensor) -> Tensor:  # (n, channel, h, w) -> (n, 1, h, w)
    if pixels.shape[1] != 3:
        return pixels.mean(dim=1, keepdim=True)
    weights = torch.tensor(LUMA).view(1, 3, 1, 1)
    return (pixels * weights).sum(dim=1, keepdim=True)
