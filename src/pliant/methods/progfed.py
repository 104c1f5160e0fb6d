"""ProgFed: train the first stages of a network with exits, and add the others one by one.

Wang et al., "ProgFed: Effective, communication, and computation efficient federated learning by
progressive training", ICML 2022; without warming up new stages.
"""

from collections.abc import Iterable
from typing import ClassVar

from pliant.devices import BudgetPolicy, CostRows, PerBatch
from pliant.methods.aggregation import Updates, Weighting
from pliant.methods.base import LocalTraining, ServerState, Step, Task, TaskKey, Update
from pliant.methods.depth import check_exits, count_macs, peek_row, train_part
from pliant.methods.server_optimisers import AnyServerOptimiser, ServerSgd, merge_average
from pliant.nn.elastic import Elastic
from pliant.nn.exits import count_exits, select_depth
from pliant.params import Params
from pliant.value import Fraction, Value


class ProgFed(Value, frozen=True, tag="progfed"):
    """Train a network that gets deeper, stage by stage, in the first `growth` of the run.

    Each stage is trained with the exit behind it, as long as every other; the rest of the run
    trains the full network. Devices make as many steps as fit into a round, up to `local.epochs`
    passes over their data. Stages that are not trained yet are charged to downloads and uploads
    although they need not be sent.

    >>> import pliant as pl
    >>> pl.ProgFed(growth=0.3).local.epochs
    1
    """

    merges_stream: ClassVar[bool] = True

    local: LocalTraining = LocalTraining()
    growth: Fraction = 0.5  # share of the run; 0: train at full depth from the start
    weighting: Weighting = "samples"
    server: AnyServerOptimiser = ServerSgd()

    def make_budget_policy(self, net: Elastic) -> BudgetPolicy:
        parts = [select_depth(net, row + 1) for row in range(count_exits(net))]
        costs = tuple(count_macs(part) / count_macs(net) for part in parts)
        return PerBatch(CostRows(costs), "unlimited")

    def limit_row(self, net: Elastic, state: ServerState, progress: float) -> int:
        stages = count_exits(net)
        if progress >= self.growth:
            return stages - 1
        return min(int(progress / self.growth * stages + 1e-9), stages - 1)

    def select_trained(self, net: Elastic, state: ServerState, last_row: int | None) -> Elastic:
        return net if last_row is None else select_depth(net, last_row + 1)

    def init_state(self, params: Params) -> ServerState:
        check_exits(params)
        return ServerState(params)

    def macs(self, net: Elastic, row: int, key: TaskKey, step: int) -> float:
        return count_macs(select_depth(net, row + 1))

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        row, steps = peek_row(steps)
        part = select_depth(net, row + 1)
        return train_part(net, part, task, steps, self.local.optimiser)

    def merge(self, net: Elastic, state: ServerState, updates: Updates) -> ServerState:
        return merge_average(self.server, net, state, updates, self.weighting)
