"""The client's local loss: supervised NT-Xent on the embeddings of a mini-batch.

Positives are pairs with equal labels. As in pytorch-metric-learning, which the authors of AdaSplit
used, an anchor's other positives are not in its denominator.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_MASKED = -1e9  # finite, so that an anchor without negatives does not give NaN


def nt_xent(embeddings: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the mean loss over ordered pairs of the same class, or 0 if there are none.

    >>> import torch
    >>> from pliant.split.losses import nt_xent
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
