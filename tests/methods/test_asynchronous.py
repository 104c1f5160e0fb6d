"""FedAsync and FedBuff: laws, and what public implementations got wrong."""

import dataclasses
from itertools import count

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tests.engine.small_runs import FLEET, LOCAL, SETTINGS, NoTraining, data, network
from tests.methods.tiny_runs import get_weights, make_net, make_state, make_update

from pliant.devices import ConstantTrace, DeviceClass, Fleet, SteppedTrace
from pliant.engine.ledger import TaskRecord, verify_records
from pliant.engine.round_loop import Run
from pliant.engine.round_rules import RoundRules
from pliant.engine.run_store import RunState, load_trained_params, read_records
from pliant.engine.simulate import simulate
from pliant.engine.simulated_devices import schedule_round
from pliant.engine.worker_context import build_context
from pliant.methods import (
    Coherent,
    ConstantStaleness,
    Distreal,
    FedAsync,
    FedAvg,
    FedBuff,
    HeteroFl,
    HingeStaleness,
    PolynomialStaleness,
    Progressive,
    ServerAdam,
    ServerSgd,
    Stage,
)
from pliant.methods.base import LocalTraining, ServerState
from pliant.nn.models import digits_cnn_bn
from pliant.nn.optimisers import Sgd
from pliant.params import get_params

EQUAL = Fleet(size=12, speed=ConstantTrace(0.8))
WAITING = replace(SETTINGS, rules=RoundRules(late="wait"))


def run(method, folder=None, *, fleet=FLEET, settings=WAITING, stop=None, module=None):
    module = module or network()
    records = simulate(method, module, data(), fleet, settings=settings, folder=folder)
    return [record for record, _ in zip(records, range(stop or 10**6), strict=False)]


def read_tasks(folder):
    return [record for record in read_records(folder) if isinstance(record, TaskRecord)]


def drop_staleness(records):
    """Return the records of versions as those of rounds, which have no staleness."""
    assert {record.staleness for record in records} == {0.0}
    return [replace(record, staleness=None) for record in records]


def make_staggered(sizes, traces):
    """Return a fleet with so many devices of each class, and the seed that draws it."""
    classes = tuple(DeviceClass(name=str(i), speed=trace) for i, trace in enumerate(traces))
    fleet, expected = Fleet(size=sum(sizes), classes=classes), np.repeat(range(len(sizes)), sizes)
    everyone = np.arange(fleet.size)
    for seed in count():
        if sorted(fleet.get_class_indices(everyone, seed=seed)) == expected.tolist():
            return fleet, seed


# Laws.


@pytest.mark.parametrize("server", [ServerSgd(), ServerSgd(lr=0.5, momentum=0.9), ServerAdam()])
def test_a_buffer_of_all_equal_devices_is_a_round(server):
    inner = FedAvg(LOCAL, server=server)
    expected = run(inner, fleet=EQUAL)
    for method in (FedBuff(inner, 4, 4), FedBuff(inner, 4)):  # per_round is 4
        assert drop_staleness(run(method, fleet=EQUAL)) == expected


def test_one_device_after_another_is_a_round_of_one():
    settings = replace(WAITING, per_round=1)
    expected = run(FedAvg(LOCAL), settings=settings)
    one = FedAsync(alpha=1.0, rho=0.0, local=LOCAL, concurrency=1)
    for method in (one, FedBuff(FedAvg(LOCAL), 1, 1)):
        assert drop_staleness(run(method, settings=settings)) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda staleness: FedAsync(staleness=staleness, local=LOCAL),
        lambda staleness: FedBuff(FedAvg(LOCAL), 1, staleness=staleness),
    ],
    ids=["fedasync", "fedbuff"],
)
def test_a_far_hinge_and_a_flat_polynomial_are_constant(make):
    rules = ConstantStaleness(), PolynomialStaleness(0.0), HingeStaleness(limit=1e9)
    constant, flat, far = (run(make(rule))[-1].digest for rule in rules)
    assert constant == flat == far
    assert run(make(PolynomialStaleness(0.5)))[-1].digest != constant


@pytest.mark.parametrize(("buffer", "groups"), [(2, 3), (1, 2), (3, 1)])
def test_staleness_at_equal_speeds_is_concurrency_over_buffer_less_one(buffer, groups, tmp_path):
    # groups start 1/4 s apart; then every task takes 1 s
    traces = [
        SteppedTrace(times=(0.0, group / 4 + 1e-9), speeds=(1e-12 if group else 1.0, 1.0))
        for group in range(groups)
    ]
    fleet, seed = make_staggered([buffer] * groups, traces)
    settings = replace(WAITING, rounds=12, seed=seed)
    run(
        FedBuff(buffer=buffer, concurrency=buffer * groups),
        tmp_path,
        fleet=fleet,
        settings=settings,
    )
    tasks = [task for task in read_tasks(tmp_path) if task.sent_at > 0]
    assert len(tasks) > 2 * buffer * groups
    assert {task.staleness for task in tasks if task.steps} == {groups - 1}


def test_staleness_adds_up_to_the_versions_that_passed(tmp_path):
    merged = run(FedBuff(buffer=2, concurrency=7), tmp_path, settings=replace(WAITING, rounds=20))
    tasks = read_tasks(tmp_path)
    ends = np.array([record.seconds for record in merged])
    passed = [int(((ends > task.sent_at) & (ends < ends[task.round])).sum()) for task in tasks]
    assert sum(task.staleness for task in tasks) == sum(passed) > 20
    assert verify_records(read_records(tmp_path)) == 20


# What public implementations got wrong.


def make_stale(method, net, state, x, staleness, base=0.0):
    """Return the update of a device that moved a by x/2 and b by -x/2 from `base`."""
    inputs = torch.full((1, 1, 1, 1), float(x)), torch.zeros(1, dtype=torch.int64)
    update = make_update(method, net, make_state(net, method), 0, [inputs])
    params = {
        n: torch.full_like(t, base) if n == "0.weight" else t for n, t in state.params.items()
    }
    return dataclasses.replace(update, staleness=staleness, base=params)


PLAIN = LocalTraining(Sgd(lr=1.0))


def test_the_mixing_weight_does_not_shrink_from_merge_to_merge():
    method, net = FedAsync(alpha=0.5, rho=0.0, local=PLAIN), make_net()
    state = make_state(net, method)
    for left in (0.75, 0.75**2, 0.75**3):  # alpha · (3 + 1) ** -0.5 is a quarter
        state = method.merge(net, state, [make_stale(method, net, state, 1.0, staleness=3)])
        assert get_weights(state) == pytest.approx([0.5 * (1 - left), -0.5 * (1 - left)])


def test_the_networks_are_mixed_not_their_deltas():
    method, net = FedAsync(alpha=0.5, rho=0.0, local=PLAIN), make_net()
    state = ServerState(
        {n: t + 2.0 if n == "0.weight" else t for n, t in get_params(net.module).items()}
    )
    update = make_stale(method, net, state, 1.0, staleness=0)  # from 0 to 0.5 and -0.5
    assert get_weights(method.merge(net, state, [update])) == [1.25, 0.75]


def test_neither_devices_nor_samples_change_the_mixing_weight():
    method, net = FedAsync(alpha=0.5, rho=0.0, local=PLAIN), make_net()
    state = make_state(net, method)
    update = make_stale(method, net, state, 1.0, staleness=0)
    expected = method.merge(net, state, [update]).params
    other = dataclasses.replace(update, num_samples=100, samples=7, device=55)
    assert torch.equal(method.merge(net, state, [other]).params["0.weight"], expected["0.weight"])


def test_weights_of_staleness_by_hand():
    assert [PolynomialStaleness(1.0).weigh(d) for d in (0, 1, 3)] == [1.0, 0.5, 0.25]
    assert [HingeStaleness(1.0, 4.0).weigh(d) for d in (0, 4, 5, 7)] == [1.0, 1.0, 0.5, 0.25]


def test_staleness_counts_from_the_download(tmp_path):
    fleet, seed = make_staggered([1, 1], [ConstantTrace(1.0), ConstantTrace(0.4)])
    settings = replace(WAITING, rounds=4, seed=seed)
    merged = run(FedAsync(concurrency=2), tmp_path, fleet=fleet, settings=settings)
    assert [record.seconds for record in merged] == pytest.approx([1.0, 2.0, 2.5, 3.0])
    stale = [task.staleness for task in read_tasks(tmp_path) if task.steps]
    assert stale == [0, 0, 2, 1]  # the slow device was sent version 0 and arrives third


def test_updates_of_one_instant_are_mixed_one_after_another(tmp_path):
    merged = run(FedAsync(concurrency=3, local=LOCAL), tmp_path, fleet=EQUAL, settings=WAITING)
    assert [record.merged for record in merged] == [1] * 6
    assert [record.seconds for record in merged] == [1.25] * 3 + [2.5] * 3
    assert [task.staleness for task in read_tasks(tmp_path) if task.steps] == [0, 1, 2] * 2


def test_a_stale_delta_counts_less_but_its_statistics_count_as_they_are():
    net = make_net()
    method = FedBuff(FedAvg(PLAIN))
    state = make_state(net, method.inner)
    update = make_stale(method.inner, net, state, 1.0, staleness=3)
    update.delta["2.weight"] = torch.ones(2, 2)  # not trained, like running statistics
    base = {**state.params, "2.weight": torch.full((2, 2), 3.0)}
    params = {**state.params, "2.weight": torch.full((2, 2), 5.0)}
    delta = method.discount(net, params, dataclasses.replace(update, base=base)).delta
    assert delta["0.weight"].flatten().tolist() == [0.25, -0.25]
    assert torch.equal(delta["2.weight"], torch.full((2, 2), -1.0))  # from 5 to the device's 3 + 1


@pytest.mark.parametrize("inner", [FedAvg(LOCAL), HeteroFl(local=LOCAL)], ids=["whole", "packed"])
def test_stale_statistics_leave_no_negative_variance(inner, tmp_path):
    """Eight deltas of about -0.9 from the variance 1, one by one, would make it negative."""
    method = FedBuff(inner, buffer=1, concurrency=8)
    settings = replace(WAITING, rounds=8)
    module = digits_cnn_bn(5, filters=(4, 6), hidden=8, side=16)
    merged = run(method, tmp_path, settings=settings, module=module)
    assert [record.merged for record in merged] == [1] * 8
    params = load_trained_params(tmp_path)
    assert min(float(params[name].min()) for name in params if "running_var" in name) > 0


# Other methods under FedBuff.

STAGES = (Stage(0.5, width=0.5), Stage())
PROGRESSIVE = Progressive(STAGES, LocalTraining(batch=8, epochs=3))


@pytest.mark.parametrize("work", ["pass", "seconds"])
@pytest.mark.parametrize(
    "inner",
    [Distreal(local=LOCAL), Coherent(local=LOCAL), PROGRESSIVE],
    ids=["distreal", "coherent", "progressive"],
)
def test_other_methods_take_their_steps_and_resume_exactly(inner, work, tmp_path):
    method = FedBuff(inner, buffer=2, concurrency=4, work=work)
    settings = replace(SETTINGS, checkpoint_every=1)
    run(method, tmp_path / "whole", settings=settings)
    run(method, tmp_path / "parts", settings=settings, stop=3)
    run(method, tmp_path / "parts", settings=settings)
    whole, parts = ((tmp_path / n / "events.jsonl").read_bytes() for n in ("whole", "parts"))
    assert whole == parts
    assert verify_records(read_records(tmp_path / "whole")) == 6
    tasks = read_tasks(tmp_path / "whole")
    assert len({row for task in tasks for row in task.rows}) > 1  # not only full steps


def test_stages_follow_the_virtual_seconds(tmp_path):
    settings = replace(SETTINGS, seconds=4.0, rules=RoundRules("partial"))
    run(FedBuff(PROGRESSIVE, 2, 4, work="seconds"), tmp_path, settings=settings)
    tasks = read_tasks(tmp_path)
    assert all(set(task.rows) == {int(task.sent_at >= 2.0)} for task in tasks if task.rows)
    assert {task.sent_at >= 2.0 for task in tasks} == {False, True}


# Against theory: tasks whose length is exponential, with a mean of one second.


class ExponentialCosts(NoTraining):
    """One mini-batch per task, whose cost is exponential around that of a full one."""

    local = LocalTraining(batch=64)

    def macs(self, net, row, key, step):
        return net.macs(net.full, training=True) * key.rng_stream("length").exponential()


class ExponentialBuffer(ExponentialCosts):
    """The same, merged in buffers of four of ten tasks."""

    concurrency, buffer, work = 10, 4, "pass"


def test_a_round_of_exponential_tasks_takes_a_harmonic_number():
    context = build_context(network(), data(), ExponentialCosts())
    state = RunState(0, 0.0, ServerState(get_params(network())), {})
    settings, lengths = replace(WAITING, per_round=10), []
    for number in range(400):
        at_round = dataclasses.replace(state, next_round=number)
        run_at = Run(context, Fleet(size=10), settings, at_round)
        lengths.append(schedule_round(run_at, np.arange(10)).closed_at)
    expected = sum(1 / number for number in range(1, 11))
    assert np.mean(lengths) == pytest.approx(expected, rel=0.03)


def test_a_buffer_of_exponential_tasks_fills_at_the_rate_of_all():
    settings = replace(WAITING, rounds=250, step_records=False)
    settings = replace(settings, evaluation=replace(settings.evaluation, every=250))
    merged = run(ExponentialBuffer(), fleet=Fleet(size=1000), settings=settings)
    assert 250 / merged[-1].seconds == pytest.approx(10 / 4, rel=0.03)
