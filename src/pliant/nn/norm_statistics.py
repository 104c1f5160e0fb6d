"""Batch-norm statistics for evaluation: one policy for all methods.

Running averages collected under dropout overestimate the variances of the full network (Li et al.,
"Understanding the disharmony between dropout and batch normalization", CVPR 2019). Re-estimating
them on a small proxy set fixes this. HeteroFL's static batch norm (Diao et al., ICLR 2021) does the
same on all training data.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any

import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pliant.params import Params, clone, find_device
from pliant.value import Value

AtLeastTwo = Annotated[int, Meta(ge=2)]


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

    samples: AtLeastTwo = 2000
    batch: AtLeastTwo = 250


NormStatistics = RunningStats | ReestimatedStats


def prepare_norm_statistics(
    net: nn.Module,
    params: Mapping[str, Tensor],
    policy: NormStatistics,
    proxy_batches: Callable[[int, int], Iterable[Tensor]],
) -> Params:
    """Return parameters with norm statistics for evaluation.

    `proxy_batches(samples, batch)` yields batches of inputs, which count by their samples.
    """
    prepared = clone(params)
    if isinstance(policy, RunningStats) or not find_norms(net):
        return prepared
    net_copy = copy.deepcopy(net).eval()
    net_copy.load_state_dict(prepared, strict=False)
    norms: dict[str, Any] = {path: net_copy.get_submodule(path) for path in find_norms(net)}
    for norm in norms.values():
        norm.reset_running_stats()
        norm.train()
    seen = 0
    with torch.no_grad():
        for inputs in _join_lone_images(proxy_batches(policy.samples, policy.batch)):
            seen += len(inputs)
            for norm in norms.values():
                norm.momentum = len(inputs) / seen  # a mean over all samples
            net_copy(inputs.to(find_device(net)))
    statistics = net_copy.state_dict()
    for path in norms:
        for name in ("running_mean", "running_var"):
            prepared[f"{path}.{name}"] = statistics[f"{path}.{name}"].clone()
    return prepared


def find_norms(net: nn.Module) -> dict[str, _BatchNorm]:
    """Return the layers whose running statistics training updates, by path.

    In a network in training mode, a layer in evaluation mode is frozen.
    """
    return {
        path: module
        for path, module in net.named_modules()
        if isinstance(module, _BatchNorm)
        and module.track_running_stats
        and module.training >= net.training
    }


def check_proxy_size(count: int) -> None:
    """Raise if there are too few proxy images for a variance."""
    if count < 2:
        raise ValueError(
            f"Expected at least 2 proxy images to re-estimate norm statistics, got {count}"
        )


def _join_lone_images(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """Append a batch of one image, which has no variance, to the batch before it."""
    previous: Tensor | None = None
    for batch in batches:
        if previous is None:
            previous = batch
        elif len(batch) == 1:
            previous = torch.cat([previous, batch])
        else:
            yield previous
            previous = batch
    check_proxy_size(0 if previous is None else len(previous))
    if previous is not None:
        yield previous
