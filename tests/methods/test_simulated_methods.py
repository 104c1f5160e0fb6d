"""Every method in the simulator: costs, bytes, resuming, and the laws once more."""

import msgspec
import pytest
import torch

from pliant.data import Iid, ImageDataset
from pliant.data.federated import TrainTestData
from pliant.devices import ChangingTrace, ConstantTrace, CostRows, Fleet, PerRound
from pliant.engine.evaluation import Evaluation
from pliant.engine.round_loop import RunSettings
from pliant.engine.round_rules import RoundRules
from pliant.engine.run_store import read_records
from pliant.engine.simulate import simulate
from pliant.methods import (
    Coherent,
    Distreal,
    Elfish,
    FedAvg,
    FedDropout,
    FedNova,
    FedProx,
    FedRolex,
    Fjord,
    HeteroFl,
    LocalTraining,
    Sandwich,
    Scaffold,
    ServerAdagrad,
    ServerSgd,
    ServerYogi,
)
from pliant.methods.aggregation import apply_delta, average_deltas
from pliant.methods.base import ServerState, train_locally
from pliant.nn.elastic import elastic
from pliant.nn.models import digits_cnn_bn
from pliant.nn.optimisers import Sgd
from pliant.params import get_params, nbytes
from pliant.workers.pool import InlineWorkers

LOCAL = LocalTraining(Sgd(lr=0.05, clip=5.0), batch=8)


class OnlyLocal:
    """A method that leaves everything to the defaults."""

    local = LOCAL


class AllVerbs:
    """FedAvg with every verb spelt out."""

    local = LOCAL

    def make_budget_policy(self, net):
        return PerRound(CostRows((1.0,)))

    def select_subnet(self, net, row, key, step):
        return net.full

    def macs(self, net, row, key, step):
        return net.macs(net.full, training=True)

    def subnet_to_send(self, net, row, key):
        return None

    def train(self, net, task, steps):
        return train_locally(net, task, steps, LOCAL.optimiser)

    def extra_upload_bytes(self, net):
        return 0

    def init_state(self, params):
        return ServerState(params)

    def broadcast(self, state):
        return {}

    def merge(self, net, state, updates):
        delta = average_deltas(net, state.params, updates, lambda update: update.samples)
        return ServerState(apply_delta(state.params, delta))


METHODS = {
    "only-local": OnlyLocal(),
    "fedavg": FedAvg(LOCAL),
    "fedavgm": FedAvg(LOCAL, server=ServerSgd(momentum=0.5)),
    "fedprox": FedProx(0.1, LOCAL),
    "fednova": FedNova(LOCAL),
    "scaffold": Scaffold(LOCAL),
    "feddropout": FedDropout(LOCAL),
    "heterofl": HeteroFl(LOCAL, masked=True),
    "fjord": Fjord(LOCAL),
    "fjord-distilled": Fjord(LOCAL, distilled=True),
    "fjord-dynamic": Fjord(LOCAL, dynamic=True),
    "sandwich": Sandwich(LOCAL),
    "fedrolex": FedRolex(LOCAL),
    "elfish": Elfish(LOCAL),
    "distreal": Distreal(local=LOCAL),
    "coherent": Coherent(local=LOCAL),
    "scaffold-yogi": Scaffold(LOCAL, server=ServerYogi()),
    "elfish-adagrad": Elfish(LOCAL, server=ServerAdagrad(beta1=0.5)),
    "heterofl-momentum": HeteroFl(LOCAL, server=ServerSgd(momentum=0.5)),
    "distreal-yogi": Distreal(local=LOCAL, server=ServerYogi()),
}
FULL = Fleet(size=6, speed=ConstantTrace(1.0))
UNEQUAL = Fleet(size=6, speed=ChangingTrace(low=0.3, high=0.9, per_round=2.0))
SETTINGS = RunSettings(
    rounds=2,
    per_round=3,
    rules=RoundRules(late="partial"),
    evaluation=Evaluation(every=2),
    checkpoint_every=1,
)


def make_images(count, seed=0):
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    pixels = torch.randint(0, 128, (count, 1, 16, 16), generator=rng, dtype=torch.uint8)
    pixels[torch.arange(count), 0, 3 * labels] += 127
    return ImageDataset.from_tensors(pixels, labels, classes=4)


DATA = TrainTestData(make_images(140), make_images(40, seed=1)).share(Iid(), 6, proxy=20)


def make_network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return digits_cnn_bn(4, filters=(5, 7), hidden=8, side=16)


def run(method, fleet=UNEQUAL, *, folder=None, stop=None, **changes):
    records = []
    for record in simulate(
        method,
        make_network(),
        DATA,
        fleet,
        settings=msgspec.structs.replace(SETTINGS, **changes),
        workers=InlineWorkers(),
        folder=folder,
        is_stopped=lambda: stop is not None and len(records) + 1 >= stop,
    ):
        records.append(record)
    return records


@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_run_has_the_same_result_bit_for_bit(name, tmp_path):
    uninterrupted = run(METHODS[name])
    assert {
        outcome.partition(":")[0] for record in uninterrupted for outcome in record.outcomes
    } <= {"finished", "partial", "late"}, "no honest update is rejected"
    stopped = run(METHODS[name], folder=tmp_path, stop=1)
    assert len(stopped) == 1
    rest = run(METHODS[name], folder=tmp_path)
    assert [record.round for record in rest] == [1]
    assert rest[-1].digest == uninterrupted[-1].digest


@pytest.mark.parametrize("method", [Distreal(local=LOCAL), FedProx(0.0, LOCAL), FedNova(LOCAL)])
def test_with_full_resources_it_is_fedavg(method):
    assert run(method, FULL)[-1].digest == run(FedAvg(LOCAL), FULL)[-1].digest


def test_a_method_that_defines_only_local_is_fedavg(tmp_path):
    fleet = Fleet(size=6, speed=ChangingTrace(low=0.3, high=1.5, per_round=2.0))
    methods = {"own": OnlyLocal(), "all": AllVerbs(), "fedavg": FedAvg(LOCAL)}
    records = {}
    for name, method in methods.items():
        run(method, fleet, folder=tmp_path / name)
        records[name] = list(read_records(tmp_path / name))
    assert len({task.samples for task in records["own"][:3]}) > 1  # weights matter
    assert records["own"][-1].digest is not None
    assert records["own"] == records["all"]  # costs, bytes, outcomes and scores too
    assert records["own"] == records["fedavg"]


@pytest.mark.parametrize(
    "method", [HeteroFl(LOCAL), FedRolex(LOCAL), FedDropout(LOCAL), Coherent(local=LOCAL)]
)
def test_at_full_width_it_is_the_unweighted_mean(method):
    mean = FedAvg(LOCAL, weighting="equal")
    assert run(method, FULL)[-1].digest == run(mean, FULL)[-1].digest


def test_control_variates_are_charged():
    net = make_network()
    full = nbytes(get_params(net))
    variates = sum(p.numel() * 4 for p in net.parameters())
    first, second = run(Scaffold(LOCAL), FULL)
    assert first.up == 3 * (full + variates)
    assert first.down == 3 * full  # all variates are still zero
    assert second.down == 3 * (full + variates)
    records = run(FedAvg(LOCAL, server=ServerSgd(momentum=0.5)), FULL)
    assert [record.down for record in records] == [3 * full] * 2  # momentum is not sent


def test_the_extra_pass_of_distillation_is_charged():
    # all devices train the full width at every step, once or twice
    fast = Fleet(size=6, speed=ConstantTrace(2.0))
    once, twice = (
        sum(record.useful for record in run(Fjord(LOCAL, widths=(1.0,), distilled=kd), fast))
        for kd in (False, True)
    )
    assert twice == 2 * once


def test_packed_subnets_cost_fewer_bytes():
    full = 3 * nbytes(get_params(make_network()))
    for name in ("feddropout", "heterofl", "fedrolex", "fjord-distilled"):
        assert all(record.down < full for record in run(METHODS[name], rounds=1)), name


def test_the_trained_subnet_is_evaluated_too():
    last = run(HeteroFl(LOCAL), Fleet(size=6, speed=ConstantTrace(0.6)))[-1]
    assert last.trained_score is not None
    assert last.score is not None
    assert run(HeteroFl(LOCAL), FULL)[-1].trained_score is None


def test_a_zero_padded_subnet_computes_the_same_as_the_subnet():
    module = make_network()
    net = elastic(module, torch.zeros(2, 1, 16, 16))
    subnet, params = net.select_prefix(0.5), get_params(module)
    x = torch.rand(8, 1, 16, 16)
    expected = net.run(net.take(params, subnet), subnet, x)  # by batch statistics
    padded = net.embed(params, net.take(params, subnet), subnet)[0]
    module.load_state_dict(padded)
    torch.testing.assert_close(module.train()(x), expected)
