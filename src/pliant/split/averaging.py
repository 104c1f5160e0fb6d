"""Average parts of clients, weighted by their samples or robustly."""

from collections.abc import Mapping

import torch

from pliant.params import Params, compute_trimmed_mean, normalise_weights, weighted_sum
from pliant.split.session import Session


def average_params(session: Session, params: Mapping[int, Params], trim: float = 0.0) -> Params:
    """Average the parameters of clients, weighted by their numbers of samples.

    With `trim`, average each coordinate without weights, after leaving out this share at both ends;
    one half gives the median.
    """
    if trim:
        return _trim_params(list(params.values()), trim)
    sizes = [float(session.data.count_samples(client)) for client in params]
    mean = weighted_sum(zip(normalise_weights(sizes), params.values(), strict=True))
    first = next(iter(params.values()))
    return {
        name: (mean[name] if tensor.is_floating_point() else mean[name].round()).to(tensor.dtype)
        for name, tensor in first.items()
    }


def _trim_params(params: list[Params], trim: float) -> Params:
    merged = {}
    for name, tensor in params[0].items():
        values = torch.stack([part[name].to(torch.float64) for part in params])
        mean = compute_trimmed_mean(values, torch.ones_like(values, dtype=torch.bool), trim)
        merged[name] = (mean if tensor.is_floating_point() else mean.round()).to(tensor.dtype)
    return merged
