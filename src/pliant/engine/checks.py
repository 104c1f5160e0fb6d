"""Checks of a run's inputs, before anything is trained or written."""

import copy

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from pliant.data import FederatedData
from pliant.devices import Fleet
from pliant.engine.evaluation import Evaluation
from pliant.engine.round_loop import RunSettings
from pliant.engine.round_tasks import list_batch_sizes
from pliant.engine.worker_context import build_context
from pliant.methods.base import LocalTraining
from pliant.methods.privacy import check_private_method, require_accountant
from pliant.methods.verbs import (
    Distils,
    HasStepCost,
    Method,
    RunsAsynchronously,
    ScalesInputs,
    SharesPredictions,
    get_inner_method,
)
from pliant.nn.norm_statistics import ReestimatedStats, check_proxy_size, find_norms
from pliant.nn.sites import ElasticOptions


def check_trainable(
    method: Method,
    net: nn.Module,
    data: FederatedData,
    evaluation: Evaluation,
    options: ElasticOptions,
) -> None:
    """Raise if the method cannot train the network, or if it cannot be evaluated."""
    method = get_inner_method(method)
    if not any(isinstance(module, _ConvNd) for module in net.modules()):
        # may have no sites; quick without convolutions
        build_context(net, data, method, options, check=False)
    if isinstance(method, ScalesInputs):  # to sizes at which the network may not run
        build_context(net, data, method, options, check=False).check_image_sizes()
    if isinstance(method, Distils) and not len(data.proxy):
        raise ValueError(
            f"Expected proxy images for {type(method).__name__} to train on, got none; set "
            "`data.proxy`, or `server.proxy` if devices bring their own data"
        )
    if isinstance(method, SharesPredictions):
        _check_predictions(method, data)
    _check_lone_samples(net, data, method.local)
    if isinstance(evaluation.statistics, ReestimatedStats) and find_norms(net):
        check_proxy_size(len(data.proxy))


def _check_predictions(method: SharesPredictions, data: FederatedData) -> None:
    """Raise if devices cannot predict on proxy images, or have no tests for their own networks."""
    name, images = type(method).__name__, len(data.proxy)
    if images < method.proxy_images:
        raise ValueError(
            f"Expected at least {method.proxy_images} proxy images for {name}, as "
            f"`method.proxy_images` says, got {images or 'none'}; set `data.proxy`"
        )
    if not data.test_shares:
        raise ValueError(
            f"Expected tests of their own for the devices of {name}, each of which has its own "
            "network, got none; set `data.device_tests`"
        )


def check_asynchronous(method: Method, settings: RunSettings, fleet: Fleet) -> None:
    """Raise if an asynchronous method cannot run with these settings on this fleet."""
    if not isinstance(method, RunsAsynchronously):
        return
    if method.concurrency is not None and not 1 <= method.concurrency <= fleet.size:
        raise ValueError(
            f"Expected a concurrency of 1 to {fleet.size} tasks, one per device of the fleet, "
            f"got {method.concurrency}"
        )
    tasks = method.concurrency or min(settings.per_round, fleet.size)
    if not 1 <= method.buffer <= tasks:
        raise ValueError(
            f"Expected a buffer of 1 to {tasks} updates, the number of tasks in flight, "
            f"got {method.buffer}"
        )
    if method.work == "seconds" and settings.rules.late == "wait":
        raise ValueError(
            'Expected rules.late = "partial" or "discard", a deadline for each task, with '
            'method.work = "seconds", got "wait"'
        )
    if not isinstance(settings.select, str):
        kind = type(settings.select).__name__
        raise ValueError(
            f'Expected select = "uniform" or "available" for an asynchronous method, got {kind}, '
            "which counts rounds"
        )


def check_step_time(method: Method, settings: RunSettings, fleet: Fleet) -> None:
    """Raise if virtual time cannot follow the step times of these settings."""
    if settings.step_time is None:
        return
    if fleet.macs_per_second is None:
        raise ValueError(
            "Expected `fleet.macs_per_second` with `step_time`: the speed of the full network"
        )
    if isinstance(method := get_inner_method(method), HasStepCost):
        raise ValueError(
            f"Expected no `step_time` for {type(method).__name__}: it counts the MACs of its steps "
            "itself, and their time is not known"
        )


def check_average(method: Method, settings: RunSettings) -> None:
    """Raise if there is no shared network whose rounds could be averaged."""
    if settings.ema_decay and isinstance(method, SharesPredictions):
        raise ValueError(
            f"Expected no `ema_decay` for {type(method).__name__}, each of whose devices has its "
            "own network"
        )


def check_privacy(method: Method, net: nn.Module, settings: RunSettings) -> None:
    """Raise if these settings cannot keep devices private."""
    if settings.privacy is None:
        return
    check_private_method(method)
    if settings.select != "uniform":
        raise ValueError(
            'Expected select = "uniform" with `privacy`, which counts on an equal chance for every '
            "device"
        )
    if find_norms(net) and not isinstance(settings.evaluation.statistics, ReestimatedStats):
        raise ValueError(
            'Expected evaluation.statistics of type "reestimated" with `privacy` and batch norm, '
            "as the devices' running statistics are not merged"
        )
    if settings.privacy.noise:
        require_accountant()  # fail now, not after the first round


def _check_lone_samples(net: nn.Module, data: FederatedData, local: LocalTraining) -> None:
    sizes = data.sizes()
    lone = [
        device
        for device in range(len(sizes))
        if any(1 in list_batch_sizes(size, local)[-1:] for size in _list_sizes(data, device, local))
    ]
    if not lone or _can_train_on_one(net, data):
        return
    count = sizes[lone[0]]
    others = f" (and {len(lone) - 1} more)" if len(lone) > 1 else ""
    can_drop = count > 1 and local.batch > 1
    raise ValueError(
        "Expected mini-batches of at least 2 samples, as batch norm on single values has no "
        f"variance, got one of 1 on device {lone[0]}{others}: {count} samples in batches of "
        f"{local.batch}" + ("; set `drop_short` in the local training" if can_drop else "")
    )


def _list_sizes(data: FederatedData, device: int, local: LocalTraining) -> range:
    """Return the numbers of samples that a device may train on: several, if they grow."""
    first, last = data.count_samples(device, 0.0), data.count_samples(device)
    return range(first, min(last, first + local.batch) + 1)  # then sizes repeat


def _can_train_on_one(net: nn.Module, data: FederatedData) -> bool:
    """Try a training pass of one image, on a copy of the network."""
    net_copy = copy.deepcopy(net).train()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            net_copy(data.make_example())
        except ValueError as error:
            if "more than 1 value per channel" in str(error):
                return False
            raise
    return True
