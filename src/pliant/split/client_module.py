"""A client's module: its part of the network, and the head and loss that train it alone."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pliant import rng

HIDDEN, EMBEDDING = (128, 256), 64  # for feature maps and flat features; Chopra et al., AdaSplit
POOLED_SIDE = 4  # of the feature maps that an auxiliary classifier sees
_MASKED = -1e9  # finite, so that an anchor without negatives does not give NaN


class ClientModule(nn.Module):
    """A device's part with a head; returns the embedding and the activation to send."""

    def __init__(self, device: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.device = device
        self.head = head
        self.training = device.training  # else a network in evaluation mode would seem frozen

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        activation = self.device(x)
        # Elastic networks pass all channels, with zeros for dropped ones, to operations they do
        # not know. So this no-op lets filters be dropped although all channels are sent.
        return self.head(activation), torch.positive(activation)


def make_projection_head(shape: tuple[int, ...]) -> nn.Module:
    """Make a projection head for activations of this shape."""
    if len(shape) == 3:
        return nn.Sequential(
            nn.Conv2d(shape[0], HIDDEN[0], 1),
            nn.LeakyReLU(),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
            nn.Linear(HIDDEN[0], EMBEDDING),
        )
    features = torch.Size(shape).numel()
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(features, HIDDEN[1]),
        nn.LeakyReLU(),
        nn.Linear(HIDDEN[1], EMBEDDING),
    )


def make_classifier(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Make an auxiliary classifier: one linear layer on the activations, feature maps pooled."""
    layers: list[nn.Module] = [nn.Flatten()]
    if len(shape) == 3:
        layers.insert(0, nn.AdaptiveAvgPool2d(POOLED_SIDE))
        shape = (shape[0], POOLED_SIDE, POOLED_SIDE)
    return nn.Sequential(*layers, nn.Linear(torch.Size(shape).numel(), classes))


def compute_auxiliary_loss(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Return the cross-entropy of the auxiliary classifier."""
    return F.cross_entropy(output[0], labels)


def reinitialise(net: nn.Module, seed: int, *address: str | int) -> nn.Module:
    """Return a copy with new random weights, by torch's default for each layer."""
    new = copy.deepcopy(net)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.derive_seed(seed, *address))
        for module in new.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
    return new


def nt_xent(embeddings: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the supervised NT-Xent over ordered pairs of the same class, or 0 if there are none.

    As in pytorch-metric-learning, which the authors of AdaSplit used, an anchor's other positives
    are not in its denominator.

    >>> import torch
    >>> from pliant.split.client_module import nt_xent
    >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> round(float(nt_xent(z, torch.tensor([0, 0, 1]), temperature=1.0)), 6)  # log(1 + 1/e)
    0.313262
    """
    unit = F.normalize(embeddings.flatten(1))
    similarity = unit @ unit.T / temperature  # (anchor, other)
    is_same = labels[:, None] == labels[None, :]
    negatives = similarity.masked_fill(is_same, _MASKED).logsumexp(dim=1, keepdim=True)
    losses = F.softplus(negatives - similarity)  # -log(exp(s) / (exp(s) + sum of negatives))
    is_pair = is_same & ~torch.eye(len(labels), dtype=torch.bool)
    return (losses * is_pair).sum() / max(1, int(is_pair.sum()))
