"""Server optimisers by hand, and as part of every method."""

import math

import msgspec
import pytest
import torch
from tests.methods import test_laws as laws
from tests.methods.tiny_runs import (
    PLAIN,
    get_last_row,
    get_weights,
    make_batch,
    make_net,
    make_state,
    make_update,
)

from pliant.methods import (
    FedAvg,
    HeteroFl,
    ServerAdagrad,
    ServerAdam,
    ServerExtrapolation,
    ServerSgd,
    ServerYogi,
)
from pliant.methods.state import flatten_state
from pliant.params import digest

# device 0 moves by (1, -1), device 1 by (-2, 2): their mean is (-0.5, 0.5)
TWO_DEVICES = [(0, [make_batch(2)]), (1, [make_batch(4, 1)])]


def run_round(method, devices, state=None):
    net = make_net()
    state = state or make_state(net, method)
    updates = [make_update(method, net, state, *device) for device in devices]
    return method.merge(net, state, updates)


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        # moments m = 0.5 · d = -0.25, and v = tau² changed towards d² = 0.25
        (ServerAdam(lr=2.0, beta1=0.5, beta2=0.75, tau=0.5), 2 * -0.25 / (0.5 + 0.5)),
        (ServerYogi(lr=0.75, beta1=0.5, beta2=0.25, tau=0.25), 0.75 * -0.25 / (0.5 + 0.25)),
        (ServerAdagrad(lr=2.0, tau=0.375), 2 * -0.5 / (0.625 + 0.375)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_second_moment_starts_at_tau_squared(server, expected):
    assert get_weights(run_round(FedAvg(PLAIN, server=server), TWO_DEVICES)) == [
        expected,
        -expected,
    ]


def test_yogis_second_moment_falls_by_the_new_square_alone():
    server = ServerYogi(beta2=0.5, tau=1.0)
    state = run_round(FedAvg(PLAIN, server=server), TWO_DEVICES)
    assert state.square["0.weight"].flatten().tolist() == [1 - 0.5 * 0.25] * 2


@pytest.mark.parametrize(
    ("devices", "eps", "step"),
    [
        (TWO_DEVICES, 0.0, (2 + 8) / 2 / (2 * 0.5)),
        (TWO_DEVICES, 0.5, (2 + 8) / 2 / (2 * (0.5 + 0.5))),
        (TWO_DEVICES[:1], 0.0, 1.0),  # one device would give 1/2
        ([(0, [make_batch(2, 0, 3)]), TWO_DEVICES[1]], 0.0, (3 * 2 + 8) / 4 / (2 * 0.125)),
        ([(0, [make_batch(0)])], 0.0, 1.0),  # nothing has moved
    ],
)
def test_extrapolation_steps_further_where_devices_disagree(devices, eps, step):
    plain = run_round(FedAvg(PLAIN), devices)
    longer = run_round(FedAvg(PLAIN, server=ServerExtrapolation(eps)), devices)
    assert get_weights(longer) == [step * weight for weight in get_weights(plain)]


def test_extrapolation_counts_absent_coordinates_as_unchanged():
    # both devices have a alone, and move it by 1 and -2: 2.5 / (2 · 0.25) times the mean
    net = make_net()
    server = ServerExtrapolation(eps=0.0)
    method = HeteroFl(PLAIN, s=0.5, levels=2, scaled=False, server=server)
    state = make_state(net, method)
    updates = [make_update(method, net, state, *device, row=0) for device in TWO_DEVICES]
    assert [update.delta["0.weight"].numel() for update in updates] == [1, 1]
    assert get_weights(method.merge(net, state, updates)) == [5 * -0.5, 0.0]


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_that_of_pytorch(nesterov):
    options = {"lr": 0.5, "momentum": 0.75, "nesterov": nesterov}
    weight = torch.zeros(2, requires_grad=True)
    oracle = torch.optim.SGD([weight], **options)
    state = None
    for devices in (TWO_DEVICES, TWO_DEVICES[:1], TWO_DEVICES[1:]):
        before = [0.0, 0.0] if state is None else get_weights(state)
        plain = run_round(FedAvg(PLAIN), devices, state)
        weight.grad = torch.tensor(before) - torch.tensor(get_weights(plain))
        oracle.step()
        state = run_round(FedAvg(PLAIN, server=ServerSgd(**options)), devices, state)
        assert get_weights(state) == pytest.approx(weight.tolist(), rel=1e-6)


def test_nesterov_needs_momentum():
    with pytest.raises(ValueError, match=r"momentum above 0 with nesterov, got 0 - at"):
        ServerSgd(nesterov=True)


def with_server(name, server):
    return msgspec.structs.replace(laws.METHODS[name], server=server)


@pytest.mark.parametrize("name", laws.METHODS)
def test_momentum_changes_no_bit_of_a_first_round_but_later_ones(name):
    rows = (0, *[get_last_row(laws.METHODS[name], laws.NET)] * 2)
    plain, momentum = (
        [laws.run_rounds(with_server(name, server), rounds, rows=rows) for rounds in (1, 2)]
        for server in (ServerSgd(), ServerSgd(momentum=0.9))
    )
    assert laws.are_equal(plain[0], momentum[0])
    assert not laws.are_equal(plain[1], momentum[1])


@pytest.mark.parametrize(
    "server",
    [
        ServerSgd(0.5, 0.9, nesterov=True),
        ServerAdam(),
        ServerYogi(),
        ServerAdagrad(beta1=0.5),
        ServerExtrapolation(),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("name", laws.METHODS)
def test_every_method_takes_every_optimiser(name, server):
    method, net = with_server(name, server), laws.NET
    updates = laws.make_updates(method)
    state = method.merge(net, laws.make_state(method), updates)
    reversed_state = method.merge(net, laws.make_state(method), updates[::-1])
    assert digest(flatten_state(state)) == digest(flatten_state(reversed_state))
    for moments in (state.momentum, state.square):
        assert set(moments) in (set(), net.trainable_names)
    plain = with_server(name, ServerSgd()).merge(net, laws.make_state(method), updates)
    statistics = set(state.params) - net.trainable_names
    assert all(torch.equal(state.params[n], plain.params[n]) for n in statistics)
    assert all(math.isfinite(float(t.double().sum())) for t in state.params.values())
    idle = method.merge(net, state, [])
    assert digest(flatten_state(idle)) == digest(flatten_state(state)), "nobody sent an update"
