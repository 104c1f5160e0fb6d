"""Vary kept activations, so that the server sees more than it was sent.

A shift of feature maps is, but for the border, the shift of the image by as many strides. Mixtures
are those of Zhang et al., "mixup: Beyond empirical risk minimization", ICLR 2018, here of
activations of one client, whose labels have one meaning.
"""

import numpy as np
import torch
import torch.nn.functional as F

from pliant.data import CropFlip
from pliant.split.server import LabelledActivations


def vary_activations(
    batch: LabelledActivations,
    classes: int,
    rng: np.random.Generator,
    *,
    shift: int = 0,
    mixup: float = 0.0,
) -> LabelledActivations:
    """Shift feature maps by up to `shift` cells and mix each with another of the batch.

    The share of the other one is drawn from Beta(`mixup`, `mixup`); labels then become
    probabilities of all classes.

    >>> import torch
    >>> import pliant as pl
    >>> from pliant.split.variation import vary_activations
    >>> batch = torch.eye(3), torch.tensor([0, 1, 1])
    >>> activations, labels = vary_activations(batch, 3, pl.rng_stream(0, "mix"), mixup=0.4)
    >>> labels.sum(dim=1)
    tensor([1., 1., 1.])
    """
    activations, labels = batch
    if shift and activations.ndim == 4:
        activations = CropFlip(pad=shift, flip=False).apply(activations, rng)
    if not mixup:
        return activations, labels
    share = torch.from_numpy(rng.beta(mixup, mixup, len(labels))).to(activations.dtype)
    other = torch.from_numpy(rng.permutation(len(labels)))
    targets = F.one_hot(labels, classes).to(activations.dtype)
    column = share.reshape(-1, *[1] * (activations.ndim - 1))
    mixed = activations + column * (activations[other] - activations)
    return mixed, targets + share[:, None] * (targets[other] - targets)
