"""Batch-norm statistics for evaluation: one policy for all methods.

Running averages collected under dropout overestimate the variances of the full network (Li et al.,
"Understanding the disharmony between dropout and batch normalization", CVPR 2019). Re-estimating
them on a small proxy set fixes this. HeteroFL's static batch norm (Diao et al., ICLR 2021) does the
same on all training data.
"""

import copy
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pliant.params import Params, clone
from pliant.value import Count, Value


class RunningStats(Value, frozen=True, tag="running"):
    """Use the running averages of training.

    >>> import pliant as pl
    >>> pl.Evaluation(statistics=pl.RunningStats()).statistics
    RunningStats()
    """


class ReestimatedStats(Value, frozen=True, tag="reestimated"):
    """Re-estimate the statistics of the full network on proxy samples.

    >>> import pliant as pl
    >>> pl.Evaluation(statistics=pl.ReestimatedStats(samples=500)).statistics.samples
    500
    """

    samples: Count = 2000
    batch: Count = 250


NormStatistics = RunningStats | ReestimatedStats


def prepare_norm_statistics(
    net: nn.Module,
    params: Mapping[str, Tensor],
    policy: NormStatistics,
    proxy_batches: Callable[[int, int], Iterable[Tensor]],
) -> Params:
    """Return parameters with norm statistics for evaluation.

    `proxy_batches(samples, batch)` yields batches of inputs.
    """
    norms = [
        path
        for path, module in net.named_modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats
    ]
    prepared = clone(params)
    if isinstance(policy, RunningStats) or not norms:
        return prepared
    net_copy = copy.deepcopy(net).eval()
    net_copy.load_state_dict(prepared, strict=False)
    for path in norms:
        norm = net_copy.get_submodule(path)
        assert isinstance(norm, _BatchNorm)
        norm.reset_running_stats()
        norm.momentum = None  # a plain average over all batches
        norm.train()
    with torch.no_grad():
        for inputs in proxy_batches(policy.samples, policy.batch):
            net_copy(inputs)
    statistics = net_copy.state_dict()
    for path in norms:
        for name in ("running_mean", "running_var"):
            prepared[f"{path}.{name}"] = statistics[f"{path}.{name}"].clone()
    return prepared
