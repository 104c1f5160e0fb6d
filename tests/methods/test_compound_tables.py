"""Tables whose rows have an image side and a share of the mini-batch, in the table methods."""

import msgspec
import pytest
import torch
from tests.methods.test_progressive import (
    DATA,
    FULL_MACS,
    LOCAL,
    list_tasks,
    make_fleet,
    make_network,
    run,
)
from torch.utils.flop_counter import FlopCounterMode

from pliant.data import InputScale
from pliant.engine.worker_context import build_context
from pliant.methods import Coherent, Distreal, LocalTraining
from pliant.methods.base import TaskKey
from pliant.nn.elastic import elastic
from pliant.nn.optimisers import Sgd
from pliant.nn.pareto_table import ParetoTable, count_step_macs, resolve_table, uniform_table
from pliant.params import get_params
from pliant.workers.pool import ProcessWorkers

NET = elastic(make_network(), torch.zeros(1, 1, 16, 16))
ROWS = ((0.5, 8, 0.5), (0.25, 8, 1.0), (0.0, 12, 0.75), (0.0, None, 1.0))  # rate, side, share


def make_compound_table(rows=ROWS):
    shares = [count_step_macs(NET, rate, *scale) / FULL_MACS for rate, *scale in rows]
    return ParetoTable(
        NET.fingerprint,
        tuple((rate,) * len(NET.sites) for rate, _, _ in rows),
        tuple(shares),
        sides=tuple(side for _, side, _ in rows),
        batch_shares=tuple(share for _, _, share in rows),
    )


METHODS = {
    "distreal": Distreal(make_compound_table(), LOCAL),
    "distreal-fixed": Distreal(make_compound_table(), LOCAL, filters="round", adapts=False),
    "coherent": Coherent(make_compound_table(), LOCAL),
    "coherent-prefix": Coherent(make_compound_table(), LOCAL, filters="prefix"),
}


@pytest.mark.parametrize("name", METHODS)
def test_realised_macs_are_those_that_torch_counts(name):
    context = build_context(make_network(), DATA, METHODS[name])
    params, key = get_params(context.net.module), TaskKey(0, 0, 0)
    for row, (_, side, share) in enumerate(ROWS):
        subnet, scale = context.select_subnet(row, key, 0), context.scale_inputs(row)
        assert scale == InputScale(side, share)
        x, _ = scale.apply(torch.rand(8, 1, 16, 16), torch.zeros(8).long())
        net = context.net_at(row)
        taken = net.take(params, subnet)
        for weight in net.trainable_names:
            taken[weight].requires_grad_()
        with FlopCounterMode(display=False) as counter:
            net.run(taken, subnet, x).sum().backward()
        assert 2 * context.batch_macs(row, 8, key, 0) == counter.get_total_flops()


@pytest.mark.parametrize("sampling", ["blocks", "bernoulli", "rounded"])
@pytest.mark.parametrize(("side", "share"), [(None, 1.0), (8, 1.0), (12, 0.5)])
def test_the_cost_of_a_row_is_the_mean_of_what_torch_counts(sampling, side, share):
    rates, params, total = (0.4, 0.25, 0.5), get_params(NET.module), 0
    draws = 200
    net = NET if side is None else NET.at(side, side)
    for number in range(draws):
        subnet = NET.draw(rates, TaskKey(0, 0, number).rng_stream("dropout"), sampling)
        total += net.macs(subnet, training=True)
    with FlopCounterMode(display=False) as counter:  # of the last one, forward
        net.run(net.take(params, subnet), subnet, torch.zeros(2, 1, *[side or 16] * 2))
    assert counter.get_total_flops() == 4 * net.macs(subnet)
    expected = count_step_macs(NET, rates, side, share, sampling)
    assert share * total / draws == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("name", METHODS)
def test_explicit_full_sides_and_shares_change_nothing(name):
    plain = uniform_table(NET, rows=4)
    explicit = msgspec.structs.replace(plain, sides=(None,) * 4, batch_shares=(1.0,) * 4)
    method = METHODS[name]
    digests = [
        run(msgspec.structs.replace(method, table=table))[-1].digest for table in (plain, explicit)
    ]
    assert digests[0] == digests[1]
    context = build_context(make_network(), DATA, msgspec.structs.replace(method, table=plain))
    assert not context.scales_inputs


@pytest.mark.parametrize("name", METHODS)
def test_a_slow_device_takes_smaller_images_and_fewer_of_them(name, tmp_path):
    local = LocalTraining(Sgd(lr=0.05), batch=8)
    method = msgspec.structs.replace(METHODS[name], local=local, budget="as-written")
    run(method, make_fleet(0.3), folder=tmp_path, rounds=1)
    tasks = list_tasks(tmp_path)
    assert {row for task in tasks for row in task.rows} == {1}  # .15 fits into .3, .42 does not
    assert {task.samples for task in tasks} == {3 * 8}
    run(method, make_fleet(0.1), folder=tmp_path / "slow", rounds=1)
    slow_tasks = list_tasks(tmp_path / "slow")
    assert {(row, task.samples) for task in slow_tasks for row in task.rows} == {(0, 3 * 4)}


@pytest.mark.parametrize("name", METHODS)
def test_a_run_resumes_and_worker_processes_agree(name, tmp_path):
    uninterrupted = run(METHODS[name], workers=ProcessWorkers(2))
    run(METHODS[name], folder=tmp_path, stop=2)
    assert run(METHODS[name], folder=tmp_path)[-1].digest == uninterrupted[-1].digest


def test_a_side_at_which_the_network_cannot_run_is_refused_before_anything_is_written(tmp_path):
    table = msgspec.structs.replace(make_compound_table(), sides=(3, 8, 12, None))
    with pytest.raises(ValueError, match="cannot run at 3x3"):
        run(Distreal(table, LOCAL), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_table_of_several_stages_is_refused_in_one_line():
    plain = uniform_table(NET, rows=2)
    staged = msgspec.structs.replace(plain, stages=(0.0, 0.5))
    with pytest.raises(ValueError, match="Expected a table of one stage, got one of 2 stages"):
        Distreal(staged).make_budget_policy(NET)
    with pytest.raises(ValueError, match="a table of rates alone, got one with image sides"):
        resolve_table(make_compound_table(), NET)
