"""Methods that train the full network, by numbers that one can do on paper."""

import pytest
import torch
from tiny import PLAIN, answer, pixel, start, two_weights, weights

from pliant.methods import FedAvg, FedNova, FedProx, Local, Scaffold, ServerAdam, ServerSgd
from pliant.methods.base import SENT
from pliant.nn.optimiser import Adam, Sgd


def merged(method, answers, state=None):
    net = two_weights()
    state = state or start(net)
    return method.merge(net, state, [answer(method, net, state, *one) for one in answers])


# device 0 has class 0 and x = 2, device 1 class 1 and x = 4
ONE_EACH = [(0, [pixel(2)]), (1, [pixel(4, 1)])]


def test_fedavg_is_the_mean_by_samples():
    state = merged(FedAvg(PLAIN), [(0, [pixel(2, 0, 3)]), (1, [pixel(4, 1)])])
    assert weights(state) == [(3 * 1 - 2) / 4, (-3 * 1 + 2) / 4]


def test_fedavg_can_count_devices_equally():
    state = merged(FedAvg(PLAIN, weigh="equal"), [(0, [pixel(2, 0, 3)]), (1, [pixel(4, 1)])])
    assert weights(state) == [-0.5, 0.5]


def test_server_momentum_goes_on():
    method = FedAvg(PLAIN, server=ServerSgd(lr=2.0, momentum=0.5))
    state = merged(method, ONE_EACH)
    assert weights(state) == [-1.0, 1.0]
    state = merged(method, [(0, [pixel(0)])], state)  # nothing new: half of the last change
    assert weights(state) == [-1.5, 1.5]


def test_server_adam_divides_by_the_typical_change():
    method = FedAvg(PLAIN, server=ServerAdam(lr=0.5, beta1=0.5, beta2=0.75, tau=0.25))
    state = merged(method, ONE_EACH)  # change -0.5: 0.5 · (-0.25) / (0.25 + 0.25)
    assert weights(state) == [-0.25, 0.25]


@pytest.mark.parametrize("server", [ServerSgd(lr=0.5, momentum=0.5), ServerAdam(lr=0.5)])
def test_a_server_optimiser_leaves_what_is_not_trained_alone(server):
    state = merged(FedAvg(PLAIN, server=server), ONE_EACH)
    assert torch.equal(state.params["2.weight"], torch.eye(2))
    assert set(state.extra["momentum"]) == {"0.weight"}


def test_fedprox_pulls_back_to_what_was_sent():
    # the second sample has no gradient: only the spring moves a from 1 to 1 - 0.25
    state = merged(FedProx(0.25, PLAIN), [(0, [pixel(2), pixel(0)])])
    assert weights(state) == [0.75, -0.75]


def test_fednova_counts_changes_per_step():
    # steps 2 and 1: 1.5 · (1/2 · 1/2 + 1/2 · -2/1)
    state = merged(FedNova(PLAIN), [(0, [pixel(2), pixel(0)]), (1, [pixel(4, 1)])])
    assert weights(state) == [-1.125, 1.125]


def test_scaffold_steps_against_the_drift():
    net, method = two_weights(), Scaffold(PLAIN)
    state = start(net)
    first = [answer(method, net, state, *one) for one in ONE_EACH]
    assert first[0].memory["0.weight"].flatten().tolist() == [-1.0, 1.0]  # minus its change
    assert first[1].memory["0.weight"].flatten().tolist() == [2.0, -2.0]
    state = method.merge(net, state, first)
    assert weights(state) == [-0.5, 0.5]
    assert state.sent["0.weight"].flatten().tolist() == [0.5, -0.5]
    # no gradient: the step is - lr · (c - c_0) = -(0.5 + 1)
    second = answer(method, net, state, 0, [pixel(0)], round=1, memory=first[0].memory)
    assert second.change["0.weight"].flatten().tolist() == [-1.5, 1.5]
    assert second.memory["0.weight"].flatten().tolist() == [0.0, 0.0]
    state = method.merge(net, state, [second])
    assert state.sent["0.weight"].flatten().tolist() == [1.0, -1.0]  # the mean of 0 and 2


def test_scaffold_can_take_the_mean_over_a_whole_fleet():
    net, method = two_weights(), Scaffold(PLAIN, devices=10)
    state = method.merge(net, start(net), [answer(method, net, start(net), 1, [pixel(4, 1)])])
    torch.testing.assert_close(state.sent["0.weight"].flatten(), torch.tensor([0.2, -0.2]))
    assert list(state.sent) == ["0.weight"]
    assert state.sent is state.extra[SENT]


def test_scaffold_says_what_its_variates_weigh():
    assert Scaffold(PLAIN).answer_bytes(two_weights()) == 2 * 4


@pytest.mark.parametrize("optimiser", [Adam(), Sgd(momentum=0.9)])
def test_scaffold_refuses_steps_that_are_no_gradients(optimiser):
    with pytest.raises(ValueError, match="SGD without momentum"):
        Scaffold(Local(optimiser))


@pytest.mark.parametrize("method", [FedAvg(PLAIN), FedProx(0.1, PLAIN), FedNova(PLAIN)])
def test_a_round_without_updates_changes_nothing(method):
    net = two_weights()
    assert weights(method.merge(net, start(net), [])) == [0.0, 0.0]


def test_an_update_says_which_filters_had_how_many_steps():
    net, method = two_weights(), FedAvg(PLAIN)
    update = answer(method, net, start(net), 0, [pixel(2), pixel(1), pixel(0, 0, 3)], owned=5)
    assert update.trained == ((net.full, 3),)
    assert (update.steps, update.samples, update.owned) == (3, 5, 5)
    assert update.macs == 5 * net.macs(net.full, training=True)
