"""Every method through the simulator: costs, bytes, resume, and the laws once more."""

import msgspec
import pytest
import torch

from pliant.data import Iid, Images
from pliant.data.federated import Source
from pliant.devices import Changing, Constant, Fleet
from pliant.engine.evaluate import Evaluation
from pliant.engine.rules import Rules
from pliant.engine.simulate import Setting, simulate
from pliant.engine.workers import Inline
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
    Local,
    Scaffold,
    ServerSgd,
)
from pliant.nn.elastic import elastic
from pliant.nn.models import digits_cnn_bn
from pliant.nn.optimiser import Sgd
from pliant.params import nbytes, params_of

LOCAL = Local(Sgd(lr=0.05, clip=5.0), batch=8)
METHODS = {
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
    "fedrolex": FedRolex(LOCAL),
    "elfish": Elfish(LOCAL),
    "distreal": Distreal(local=LOCAL),
    "coherent": Coherent(local=LOCAL),
}
FULL = Fleet(size=6, speed=Constant(1.0))
UNEQUAL = Fleet(size=6, speed=Changing(low=0.3, high=0.9, per_round=2.0))
SETTING = Setting(
    rounds=2,
    per_round=3,
    rules=Rules(late="partial"),
    evaluation=Evaluation(every=2),
    checkpoint_every=1,
)


def images(count, seed=0):
    draws = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    pixels = torch.randint(0, 128, (count, 1, 16, 16), generator=draws, dtype=torch.uint8)
    pixels[torch.arange(count), 0, 3 * labels] += 127
    return Images.from_tensors(pixels, labels, classes=4)


DATA = Source(images(140), images(40, seed=1)).share(Iid(), 6, proxy=20)


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return digits_cnn_bn(4, filters=(5, 7), hidden=8, side=16)


def run(method, fleet=UNEQUAL, *, folder=None, stop=None, **changes):
    setting = msgspec.structs.replace(SETTING, **changes)
    records = []
    for record in simulate(
        method,
        network(),
        DATA,
        fleet,
        setting=setting,
        workers=Inline(),
        folder=folder,
        is_stopped=lambda: stop is not None and len(records) + 1 >= stop,
    ):
        records.append(record)
    return records


@pytest.mark.parametrize("name", METHODS)
def test_a_stopped_run_goes_on_to_the_same_bits(name, tmp_path):
    wanted = run(METHODS[name])
    assert {end.partition(":")[0] for record in wanted for end in record.ends} <= {
        "finished",
        "partial",
        "late",
    }, "no honest update is refused"
    begun = run(METHODS[name], folder=tmp_path, stop=1)
    assert len(begun) == 1
    rest = run(METHODS[name], folder=tmp_path)
    assert [record.round for record in rest] == [1]
    assert rest[-1].digest == wanted[-1].digest


@pytest.mark.parametrize("method", [Distreal(local=LOCAL), FedProx(0.0, LOCAL), FedNova(LOCAL)])
def test_with_full_resources_it_is_fedavg(method):
    assert run(method, FULL)[-1].digest == run(FedAvg(LOCAL), FULL)[-1].digest


@pytest.mark.parametrize(
    "method", [HeteroFl(LOCAL), FedRolex(LOCAL), FedDropout(LOCAL), Coherent(local=LOCAL)]
)
def test_at_full_width_it_is_the_unweighted_mean(method):
    mean = FedAvg(LOCAL, weigh="equal")
    assert run(method, FULL)[-1].digest == run(mean, FULL)[-1].digest


def test_control_variates_are_charged():
    net = network()
    whole = nbytes(params_of(net))
    trained = sum(p.numel() * 4 for p in net.parameters())
    first, second = run(Scaffold(LOCAL), FULL)
    assert first.up == 3 * (whole + trained)
    assert first.down == 3 * whole  # they are zero as yet, and known to be
    assert second.down == 3 * (whole + trained)
    plain = run(FedAvg(LOCAL, server=ServerSgd(momentum=0.5)), FULL)
    assert [record.down for record in plain] == [3 * whole] * 2  # its memory is not sent


def test_the_extra_pass_of_distillation_is_charged():
    # all devices train the full width at every step, once or twice
    fast = Fleet(size=6, speed=Constant(2.0))
    once, twice = (
        sum(record.useful for record in run(Fjord(LOCAL, widths=(1.0,), distilled=kd), fast))
        for kd in (False, True)
    )
    assert twice == 2 * once


def test_packed_sub_networks_cost_fewer_bytes():
    whole = 3 * nbytes(params_of(network()))
    for name in ("feddropout", "heterofl", "fedrolex", "fjord-distilled"):
        assert all(record.down < whole for record in run(METHODS[name], rounds=1)), name


def test_what_was_trained_at_all_is_scored_too():
    last = run(HeteroFl(LOCAL), Fleet(size=6, speed=Constant(0.6)))[-1]
    assert last.narrow is not None
    assert last.score is not None
    assert run(HeteroFl(LOCAL), FULL)[-1].narrow is None


def test_the_narrow_score_is_that_of_the_narrow_network():
    net = network()
    flexible = elastic(net, torch.zeros(2, 1, 16, 16))
    subnet = flexible.first(0.5)
    params = params_of(net)
    small = flexible.take(params, subnet)
    x = torch.rand(8, 1, 16, 16)
    wanted = flexible.run(small, subnet, x)  # by batch statistics
    padded = flexible.embed(params, flexible.take(params, subnet), subnet)[0]
    net.load_state_dict(padded)
    torch.testing.assert_close(net.train()(x), wanted)
