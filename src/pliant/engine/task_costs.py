"""What the tasks of a round cost, counted for all of them at once: MACs, bytes and memory."""

import numpy as np

from pliant.devices import DeviceCosts
from pliant.devices.budget import BoolArray
from pliant.devices.vector_rng import FloatArray, IntArray
from pliant.engine.worker_context import WorkerContext
from pliant.methods.base import TaskKey, TaskKeys
from pliant.methods.verbs import FreezesLayers
from pliant.nn.elastic import Elastic
from pliant.nn.filter_counts import make_count_costs
from pliant.params import Params, nbytes


def count_batch_macs(
    context: WorkerContext, rows: IntArray, sizes: FloatArray, keys: TaskKeys, step: int
) -> FloatArray:
    """Return the MACs of one step of several tasks, on mini-batches of these sizes."""
    if context.input_scaler is None:
        return sizes * count_step_macs(context, rows, keys, step)
    macs = np.empty(len(rows))
    for row in np.unique(rows).tolist():  # image sizes and shares are a row's own
        is_row = rows == row
        part = TaskKeys(keys.seed, keys.round, keys.devices[is_row])
        count = context.scale_inputs(row).count_samples
        samples = np.array([count(int(size)) for size in sizes[is_row]])
        per_sample = count_step_macs(context, rows[is_row], part, step, context.net_at(row))
        macs[is_row] = samples * per_sample
    return macs


def count_step_macs(
    context: WorkerContext, rows: IntArray, keys: TaskKeys, step: int, net: Elastic | None = None
) -> FloatArray:
    """Return the MACs per sample of one training step of several tasks, all at `net`'s size."""
    net = net or context.net
    if context.subnet_selector is None and context.step_coster is None:
        is_own = net is context.net
        full = context.full_macs if is_own else net.macs(net.full, training=True)
        return np.full(len(rows), full)
    costs = make_count_costs(net)
    if context.filter_counter is not None and costs is not None:
        counted = costs.macs(context.filter_counter.count_filters(context.net, rows, keys, step))
        if isinstance(context.method, FreezesLayers):
            for row in np.unique(rows).tolist():
                if (frozen := context.count_frozen_macs(row)) is not None:
                    counted[rows == row] = frozen
        return counted
    tasks = [TaskKey(keys.seed, keys.round, device) for device in keys.devices.tolist()]
    macs = [context.step_macs(*task, step) for task in zip(rows.tolist(), tasks, strict=True)]
    return np.array(macs)


def count_sent_bytes(
    context: WorkerContext, params: Params, rows: IntArray, keys: TaskKeys
) -> FloatArray:
    """Return the bytes that each device is sent: the network or a packed subnet."""
    sent = np.full(len(rows), float(nbytes(params)))
    if context.subnet_sender is None:
        return sent
    costs = make_count_costs(context.net)
    for index, device in enumerate(keys.devices.tolist()):
        key = TaskKey(keys.seed, keys.round, device)
        subnet = context.subnet_to_send(int(rows[index]), key)
        if subnet is None:
            continue
        if context.filter_counter is not None and costs is not None:  # then all are sent subnets
            return costs.nbytes(context.filter_counter.count_filters(context.net, rows, keys, 0))
        sent[index] = context.net.count_bytes(params, subnet)
    return sent


def find_fitting_rows(
    context: WorkerContext, costs: DeviceCosts, devices: IntArray
) -> BoolArray | None:
    """Return the rows whose steps fit in each device's memory; None if none is limited.

    The result is (device, row), or (device, 1) if the memory of rows is not known. Each device
    needs room for its largest mini-batch.
    """
    if np.isinf(costs.memory).all():
        return None
    batch = np.array([context.plan_work(device).sizes[0] for device in devices.tolist()])
    step_bytes = context.memory_bounds.step_bytes(context.method.local.optimiser, batch)
    return np.asarray(step_bytes <= costs.memory[:, None])
