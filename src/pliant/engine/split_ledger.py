"""The ledger of a split round: what each client did, cost, and how it ended."""

from collections.abc import Mapping, Sequence

import numpy as np

from pliant.devices import DeviceCosts, compute_joules
from pliant.engine.ledger import MERGED_OUTCOMES, ExchangeRecord, TaskRecord
from pliant.split.base import ClientCosts


def build_task_records(
    round_number: int,
    costs: Sequence[ClientCosts],
    available_macs: Mapping[int, float],
    device_costs: DeviceCosts,
) -> list[TaskRecord]:
    """Return the record of each participant, of whom the MACs that it could have done are given."""
    traffic = np.array([float(client.up + client.down) for client in costs])
    macs, idle = (
        np.array([getattr(client, name) for client in costs]) for name in ("macs", "idle")
    )
    joules = compute_joules(device_costs, macs, traffic, idle)
    return [
        _build_record(round_number, client, costs[client], available, float(joules[client]))
        for client, available in available_macs.items()
    ]


def _build_record(
    round_number: int, client: int, costs: ClientCosts, available: float, joules: float
) -> TaskRecord:
    if costs.is_rejected:
        outcome = f"rejected: {next(iter(costs.refused))}"
    elif not costs.steps:
        is_relay = costs.relayed and not costs.has_left  # it only passed its part on
        outcome = "surplus" if is_relay else "dropped"
    else:
        outcome = "partial" if costs.has_left else "finished"
    is_merged = outcome in MERGED_OUTCOMES
    return TaskRecord(
        round=round_number,
        device=client,
        outcome=outcome,
        samples=costs.samples if is_merged else 0,
        steps=costs.steps if is_merged else 0,
        macs=costs.macs,
        useful=costs.macs if is_merged else 0.0,
        available=available,
        down=costs.down,
        up=costs.up,
        seconds=costs.busy,
        joules=joules,
        loss=sum(costs.losses) / len(costs.losses) if costs.losses else None,
        exchange=ExchangeRecord(
            forward=costs.forward,
            server=costs.server,
            uplinks=costs.uplinks,
            dense=costs.dense,
            nonzero=costs.nonzero,
            relayed=costs.relayed,
            waited=costs.waited,
            refused=dict(costs.refused),
        ),
    )
