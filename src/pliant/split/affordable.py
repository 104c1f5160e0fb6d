"""Elastic client parts: a client drops filters to fit its current speed.

Rapp et al., "DISTREAL: Distributed Resource-Aware Learning in Heterogeneous Systems", AAAI 2022.
"""

import numpy as np

from pliant.devices import CostRows
from pliant.nn.pareto_table import ParetoTable, resolve_table
from pliant.split.exchange import SplitRound


def choose_affordable_rates(
    split_round: SplitRound, client: int, table: ParetoTable | None
) -> tuple[float, ...]:
    """Return the rates of the largest row of a table that a client can afford now.

    Without a table, all sites have the same rate.
    """
    resolved = resolve_table(table, split_round.session.device_net, "bernoulli")
    share = np.array([split_round.environment.affordable_share(client)])
    return resolved.rates[int(CostRows(resolved.shares).find_rows(share)[0])]
