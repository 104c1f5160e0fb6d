"""FedBuff: merge whenever a buffer of updates is full, while other devices keep working.

Nguyen et al., "Federated learning with buffered asynchronous aggregation", AISTATS 2022.
"""

from dataclasses import replace

from pliant.methods.base import LocalTraining, Update
from pliant.methods.cocofl import CoCoFl
from pliant.methods.coherent import Coherent
from pliant.methods.depthfl import DepthFl
from pliant.methods.distreal import Distreal
from pliant.methods.ditto import Ditto
from pliant.methods.elastic_batch import ElasticBatch
from pliant.methods.elfish import Elfish
from pliant.methods.fedavg import FedAvg
from pliant.methods.feddropout import FedDropout
from pliant.methods.fednova import FedNova
from pliant.methods.fedper import FedPer
from pliant.methods.fedprox import FedProx
from pliant.methods.fedrolex import FedRolex
from pliant.methods.fjord import Fjord
from pliant.methods.heterofl import HeteroFl
from pliant.methods.multihead import MultiHead
from pliant.methods.progfed import ProgFed
from pliant.methods.progressive import Progressive
from pliant.methods.sandwich import Sandwich
from pliant.methods.scaffold import Scaffold
from pliant.methods.small_network import SmallNetwork
from pliant.methods.staleness import AnyStaleness, PolynomialStaleness
from pliant.methods.verbs import Work
from pliant.nn.elastic import Elastic
from pliant.params import Params
from pliant.value import Count, Value

RoundMethod = (
    FedAvg
    | FedProx
    | FedNova
    | Scaffold
    | FedDropout
    | HeteroFl
    | Fjord
    | FedRolex
    | Elfish
    | Distreal
    | Coherent
    | Progressive
    | ElasticBatch
    | SmallNetwork
    | FedPer
    | Ditto
    | MultiHead
    | CoCoFl
    | DepthFl
    | ProgFed
    | Sandwich
)


class FedBuff(Value, frozen=True, tag="fedbuff"):
    """Merge every `buffer` updates as the `inner` method does, stale ones with less weight.

    `concurrency` tasks are always in flight. With work = "seconds", each of them has the length of
    a round and ends by the deadline rule; with "pass", devices take the time they need. Quorum,
    over-selection and early closing are rules of rounds and have no effect.

    >>> import pliant as pl
    >>> inner = pl.Progressive(server=pl.ServerSgd(momentum=0.9))
    >>> pl.FedBuff(inner, buffer=5, concurrency=20, work="seconds").local.epochs
    4
    """

    inner: RoundMethod = FedAvg(weighting="equal")
    buffer: Count = 10
    concurrency: Count | None = None  # tasks in flight; None: `per_round`
    staleness: AnyStaleness = PolynomialStaleness()
    work: Work = "pass"

    @property
    def local(self) -> LocalTraining:
        return self.inner.local

    def discount(self, net: Elastic, params: Params, update: Update) -> Update:
        """Return the update with a delta from `params`, the network that it is merged into.

        Norm statistics count as the device sends them: deltas from older networks could add up to
        a negative variance.
        """
        if update.staleness == 0:
            return update
        weight, trained = self.staleness.weigh(update.staleness), net.trainable_names
        moves = {n: update.base[n] - params[n] for n in update.delta if n not in trained}
        if update.subnet is not None:
            moves = net.take(moves, update.subnet)
        delta = {n: t + moves[n] if n in moves else weight * t for n, t in update.delta.items()}
        return replace(update, delta=delta)
