"""One server step on the mini-batches of several clients together."""

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.split.small_split import LOCAL, FreeEnvironment, make_data, make_network, run

from pliant.devices import Fleet
from pliant.engine.round_loop import RunSettings
from pliant.engine.split_virtual import VirtualEnvironment
from pliant.nn.cut import split_network
from pliant.nn.elastic import elastic
from pliant.nn.optimisers import Sgd
from pliant.params import clone, get_params
from pliant.split import AdaSplit, AuxSplit, SplitFed, SplitTraining, VanillaSplit
from pliant.split.exchange import SplitRound
from pliant.split.server import MaskedServer, SharedServer
from pliant.split.session import Session

SGD = Sgd(lr=0.1, momentum=0.0)
METHODS = [
    VanillaSplit(local=LOCAL),
    SplitFed(local=LOCAL, version=2),
    AdaSplit(local=LOCAL, kappa=0.0, eta=1.0, gradient=True),
    AuxSplit(local=LOCAL, every=1, align=2),
]


def join(method):
    return msgspec.structs.replace(method, joined=True)


@pytest.mark.parametrize("method", METHODS)
def test_joining_the_mini_batch_of_one_client_changes_nothing(method):
    joined, single = (run(m, data=make_data((17,)), rounds=2) for m in (join(method), method))
    assert joined[-1].personal == single[-1].personal
    assert [record.loss for record in joined] == [record.loss for record in single]


@pytest.mark.parametrize("method", METHODS)
def test_joined_mini_batches_cost_as_much_and_give_another_result(method):
    joined, single = run(join(method), rounds=2), run(method, rounds=2)
    assert joined[-1].digest != single[-1].digest
    for name in ("macs", "samples"):
        assert [getattr(r, name) for r in joined] == [getattr(r, name) for r in single]
    assert [r.exchange.uplinks for r in joined] == [r.exchange.uplinks for r in single]


def test_joined_split_learning_is_a_step_of_gradient_descent_on_all_images():
    local = SplitTraining(SGD, batch=8, period=0)
    method, net = VanillaSplit(local=local, joined=True), make_network()
    session = Session(method, make_network(), make_data((8, 8, 8)), Fleet(size=3), seed=0)
    batches = [session.load_batch(client, 0, 0) for client in range(3)]
    x, y = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    F.cross_entropy(net(x), y).backward()
    method.train(SplitRound(session, FreeEnvironment(3), 0, 1, max_abs=1e6))
    trained = session.assemble_params(2, session.server.effective_params(2))
    for name, param in net.named_parameters():
        expected = param.detach() - 0.1 * param.grad
        assert torch.allclose(trained[name], expected, atol=1e-6), name


def make_shared():
    module = split_network(make_network(), torch.zeros(1, 1, 16, 16), "stage1").server
    return SharedServer(elastic(module, torch.zeros(1, 4, 8, 8)), get_params(module), SGD)


def make_batch(seed, count):
    rng = torch.Generator().manual_seed(seed)
    return torch.rand(count, 4, 8, 8, generator=rng), torch.arange(count) % 3


def make_masked(penalised="own"):
    return MaskedServer(make_shared(), 3, penalty=1e-3, penalised=penalised, seed=0)


@pytest.mark.parametrize("make_server", [make_shared, make_masked])
def test_weights_take_the_mean_of_the_clients_steps_weighted_by_their_samples(make_server):
    """A step of gradient descent is linear in the gradient."""
    batches = {0: make_batch(0, 6), 2: make_batch(1, 2)}
    joined, results = make_server(), {}
    part = getattr(joined, "part", joined)
    expected = dict.fromkeys(part.params, 0.0)
    for client, batch in batches.items():
        single = make_server()
        results[client] = single.step(client, *batch, 0.1, needs_gradient=True)
        for name, tensor in getattr(single, "part", single).params.items():
            expected[name] += len(batch[1]) / 8 * tensor
        if make_server is make_masked:
            results[client] += (single.masks[client].params,)
    joined_results = joined.step_joined(batches, 0.1, needs_gradient=True)
    for name, tensor in part.params.items():
        assert torch.allclose(tensor, expected[name], atol=1e-6), name
    for client, (loss, gradient, *masks) in results.items():
        assert joined_results[client][0] == pytest.approx(loss, rel=1e-5)
        assert torch.allclose(joined_results[client][1], gradient, atol=1e-6)
        for name, tensor in masks[0].items() if masks else ():
            assert torch.allclose(joined.masks[client].params[name], tensor, atol=1e-6), name


def test_masks_outside_the_joined_batch_shrink_only_if_all_are_penalised():
    for penalised in ("own", "all"):
        server = make_masked(penalised)
        before = clone(server.get_mask(1).params)
        server.step_joined({0: make_batch(0, 4), 2: make_batch(1, 4)}, 0.1, needs_gradient=False)
        is_same = all(torch.equal(before[n], t) for n, t in server.masks[1].params.items())
        assert is_same == (penalised == "own")


def test_the_server_starts_a_joined_batch_when_it_has_all_messages():
    classes = [{"up": 10.0, "down": 10.0, "latency": 0.5}]
    fleet = msgspec.convert({"size": 2, "macs_per_second": 2.0, "classes": classes}, Fleet)
    environment = VirtualEnvironment(
        fleet, np.array([40.0, 40.0]), RunSettings(), 0, 0.0, server_speed=2.0
    )
    for client, macs in ((0, 2.0), (1, 6.0)):
        environment.compute(client, macs, 1)  # until 1 and 3 s
        environment.upload(client, 10)  # 1 s and the latency: 2.5 and 4.5 s
    environment.serve([0, 1], 4.0)  # 2 s: 6.5
    environment.download(0, 10)  # 0.5 + 1 s
    assert environment.now.tolist() == [8.0, 3.0]


@pytest.mark.parametrize(
    ("method", "fields", "reason"),
    [
        (VanillaSplit, {"turn": "pass"}, 'turn = "batch"'),
        (SplitFed, {"version": 1}, "version = 2"),
        (AdaSplit, {"relay": True}, "neither `relay` nor `send_once`"),
        (AuxSplit, {"server": "copies"}, "neither `align` nor `joined`"),
    ],
)
def test_methods_without_a_common_mini_batch_are_not_joined(method, fields, reason):
    with pytest.raises(ValueError, match=reason):
        method(joined=True, **fields)
