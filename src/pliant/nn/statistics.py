"""How norm statistics are settled for evaluation: one declared policy, the same for every method.

Running averages that were gathered under dropout do not fit the full network (its variances are
smaller: Li et al., "Understanding the disharmony between dropout and batch normalization", CVPR
2019). Estimating them again on a small proxy set mends this; HeteroFL's static batch norm (Diao et
al., ICLR 2021) is the same thing on all training data.
"""

import copy
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pliant.params import Params, clone
from pliant.value import Count, Value


class Running(Value, frozen=True, tag="running"):
    """Use the averages that training gathered.

    >>> import pliant as pl
    >>> pl.Evaluation(statistics=pl.Running()).statistics
    Running()
    """


class Reestimated(Value, frozen=True, tag="reestimated"):
    """Estimate the full network's statistics anew on proxy samples.

    >>> import pliant as pl
    >>> pl.Evaluation(statistics=pl.Reestimated(samples=500)).statistics.samples
    500
    """

    samples: Count = 2000
    batch: Count = 250


Statistics = Running | Reestimated


def settle(
    net: nn.Module,
    params: Mapping[str, Tensor],
    policy: Statistics,
    proxy: Callable[[int, int], Iterable[Tensor]],
) -> Params:
    """Return parameters whose norm statistics are ready for evaluation.

    `proxy(samples, batch)` gives batches of proxy inputs, ready for the network.
    """
    norms = [
        path
        for path, module in net.named_modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats
    ]
    settled = clone(params)
    if isinstance(policy, Running) or not norms:
        return settled
    twin = copy.deepcopy(net).eval()
    twin.load_state_dict(settled, strict=False)
    for path in norms:
        norm = twin.get_submodule(path)
        assert isinstance(norm, _BatchNorm)
        norm.reset_running_stats()
        norm.momentum = None  # a plain average over all batches
        norm.train()
    with torch.no_grad():
        for inputs in proxy(policy.samples, policy.batch):
            twin(inputs)
    found = twin.state_dict()
    for path in norms:
        for name in ("running_mean", "running_var"):
            settled[f"{path}.{name}"] = found[f"{path}.{name}"].clone()
    return settled
