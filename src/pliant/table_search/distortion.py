"""Distort the images on which the snapshot is trained, so that they differ from the real ones.

Rapp et al., DISTREAL, AAAI 2022: brightness, contrast and saturation times 0.5.
"""

from dataclasses import replace

import torch
from torch import Tensor

from pliant.data import ImageDataset
from pliant.rng import rng_stream
from pliant.value import NonNegative, Value

LUMA = (0.299, 0.587, 0.114)  # of red, green and blue, ITU-R BT.601


class Distortion(Value, frozen=True):
    """Factors for colour images; grey images get only contrast and noise."""

    brightness: NonNegative = 0.5
    contrast: NonNegative = 0.5
    saturation: NonNegative = 0.5
    noise: NonNegative = 0.1  # standard deviation, as a share of the pixel range


def distort_images(images: ImageDataset, distortion: Distortion, seed: int) -> ImageDataset:
    """Return distorted copies of the images; of signals, noisy ones, and of tokens, the same."""
    if images.pixels.dtype == torch.int64:
        return images
    is_bytes = images.pixels.dtype == torch.uint8
    pixels = images.pixels.to(torch.float32)
    if images.shape[0] == 3 and pixels.ndim == 4:
        pixels = _adjust_contrast(pixels * distortion.brightness, distortion.contrast)
        grey = _convert_to_grey(pixels)
        pixels = grey + distortion.saturation * (pixels - grey)
    else:
        pixel_range = 255.0 if is_bytes else float(pixels.max() - pixels.min())
        normal = rng_stream(seed, "distortion").standard_normal(pixels.shape, dtype="float32")
        noise = distortion.noise * pixel_range * torch.from_numpy(normal)
        pixels = _adjust_contrast(pixels, distortion.contrast) + noise
    if is_bytes:
        pixels = pixels.round().clamp_(0, 255).to(torch.uint8)
    return replace(images, pixels=pixels, name=f"{images.name}, distorted")


def _adjust_contrast(pixels: Tensor, factor: float) -> Tensor:
    dims = tuple(range(1, pixels.ndim))
    mean = _convert_to_grey(pixels).mean(dim=dims, keepdim=True)
    return mean + factor * (pixels - mean)


def _convert_to_grey(pixels: Tensor) -> Tensor:  # (n, channel, h, w) -> (n, 1, h, w)
    if pixels.shape[1] != 3 or pixels.ndim != 4:
        return pixels.mean(dim=1, keepdim=True)
    weights = torch.tensor(LUMA).view(1, 3, 1, 1)
    return (pixels * weights).sum(dim=1, keepdim=True)
