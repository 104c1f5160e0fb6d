"""The client's own objective: supervised NT-Xent on the embeddings of a mini-batch.

Positives come from labels only; an anchor's other positives are not in its denominator, as in
pytorch-metric-learning, which the authors of AdaSplit used.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_NEVER = -1e9  # finite: an anchor without a negative must not give NaN


def nt_xent(embeddings: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the mean over ordered pairs of one class; 0 where there is none.

    >>> import torch
    >>> from pliant.split.contrast import nt_xent
    >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> round(float(nt_xent(z, torch.tensor([0, 0, 1]), temperature=1.0)), 6)  # log(1 + 1/e)
    0.313262
    """
    unit = F.normalize(embeddings.flatten(1))
    alike = unit @ unit.T / temperature  # (anchor, other)
    is_same = labels[:, None] == labels[None, :]
    others = alike.masked_fill(is_same, _NEVER).logsumexp(dim=1, keepdim=True)
    losses = F.softplus(others - alike)  # -log(exp(s) / (exp(s) + sum of negatives))
    is_pair = is_same & ~torch.eye(len(labels), dtype=torch.bool)
    return (losses * is_pair).sum() / max(1, int(is_pair.sum()))
