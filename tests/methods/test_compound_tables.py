"""Tables whose rows have an image side and a share of the mini-batch, in methods."""

from itertools import accumulate

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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
from pliant.methods import Coherent, Distreal, LocalTraining, Progressive, Stage
from pliant.methods.base import TaskKey
from pliant.nn.elastic import elastic
from pliant.nn.optimisers import Sgd
from pliant.nn.pareto_table import ParetoTable, count_step_macs, resolve_table, uniform_table
from pliant.nn.table_file import load_table, save_table
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
        if name != "distreal":  # whose filters are not known before they are drawn
            planned = 8 * context.budget_policy.rows.shares[row] * FULL_MACS
            assert 2 * planned == pytest.approx(counter.get_total_flops())


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


# stages of progressive training


def make_staged_table(gains, seconds=()):
    """Repeat the rows of the compound table for stages at 0, .3 and .6 of the run."""
    table, stages = make_compound_table(), (0.0, 0.3, 0.6)
    columns = {
        name: getattr(table, name) * len(stages)
        for name in ("rates", "shares", "sides", "batch_shares")
    }
    row_stages = tuple(stage for stage in stages for _ in ROWS)
    return msgspec.structs.replace(
        table, **columns, gains=sum(gains, ()), seconds=seconds * 3, stages=row_stages
    )


# Costs are about .03, .14, .42 and 1.
RISING_GAINS = ((0.1, 0.11, 0.12, 0.13), (0.001, 0.1, 0.12, 0.13), (-0.1, -0.05, -0.02, 0.1))
RAMP = (Stage(0.3, side=8, width=0.5, batch=0.5), Stage(0.6, side=8, width=0.75), Stage())


def test_a_table_of_stages_is_the_same_as_its_best_rows_given(tmp_path):
    by_table = Progressive(local=LOCAL, table=make_staged_table(RISING_GAINS))
    given = Progressive(RAMP, LOCAL)
    records = [run(by_table, folder=tmp_path / "table"), run(given, folder=tmp_path / "stages")]
    assert records[0] == records[1]
    tasks = [list_tasks(tmp_path / name) for name in ("table", "stages")]
    assert tasks[0] == tasks[1]
    assert {row for task in tasks[0] for row in task.rows} == {0, 1, 2}
    state = given.init_state(get_params(NET.module))
    shares = [share / 20 for share in range(20)]
    limits = [[m.limit_row(NET, state, share) for share in shares] for m in (by_table, given)]
    assert limits[0] == limits[1]


def test_a_run_by_table_resumes_bit_for_bit(tmp_path):
    method = Progressive(
        local=LOCAL, table=make_staged_table(RISING_GAINS), patience=1, adapts=True
    )
    uninterrupted = run(method)
    for stop in (1, 2, 3):
        run(method, folder=tmp_path / str(stop), stop=stop)
        assert run(method, folder=tmp_path / str(stop))[-1].digest == uninterrupted[-1].digest


def test_seconds_of_the_table_count_where_it_has_them():
    context = build_context(make_network(), DATA, Progressive(local=LOCAL))
    gains = ((0.1, 0.2, 0.3, 0.4),) * 3  # per MAC the first row is best
    by_macs = Progressive(table=make_staged_table(gains))
    assert by_macs.scale_inputs(context.net, 0) == InputScale(8, 0.5)
    by_seconds = Progressive(table=make_staged_table(gains, seconds=(1.0, 1.1, 1.3, 2.0)))
    assert by_seconds.scale_inputs(context.net, 0) == InputScale(12, 0.75)  # .1, .18, .23, .2


def test_a_table_of_one_stage_lasts_until_the_last_fifth():
    table = msgspec.structs.replace(make_compound_table(), gains=(0.001, 0.1, 0.12, 0.13))
    method = Progressive(local=LOCAL, table=table)
    given = Progressive((Stage(0.8, side=8, width=0.75), Stage()), LOCAL)
    assert run(method)[-1].digest == run(given)[-1].digest


GAIN = st.floats(-0.5, 1.0, allow_subnormal=False)
STAGE_GAINS = st.lists(GAIN, min_size=4, max_size=4).map(lambda gains: tuple(sorted(gains)))


@given(st.tuples(STAGE_GAINS, STAGE_GAINS, STAGE_GAINS))
def test_the_cap_never_falls(gains):
    method = Progressive(table=make_staged_table(gains))
    shares = method.make_budget_policy(NET).rows.shares
    assert list(shares) == sorted(shares)
    best = [
        max(zip(g, make_compound_table().shares, strict=True), key=lambda p: p[0] / p[1])
        for g in gains
    ]
    highest = list(accumulate((share for _, share in best), max))
    assert shares[:3] == pytest.approx(highest, rel=0.1)  # of whole filters
    assert shares[-1] == 1.0
    state = method.init_state(get_params(NET.module))
    rows = [method.limit_row(NET, state, progress / 20) for progress in range(20)]
    assert rows == sorted(rows)
    assert [shares[row] for row in rows[16:]] == [1.0] * 4  # the last fifth


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": RAMP, "table": make_compound_table()}, "stages or a table, got both"),
        ({"table": make_compound_table()}, "a table with gains, as `pliant search` writes it"),
    ],
)
def test_a_table_that_gives_no_stages_is_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(Progressive(local=LOCAL, **options), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_searched_table_of_stages_runs_from_its_file(tmp_path):
    path = save_table(tmp_path / "table.safetensors", make_staged_table(RISING_GAINS))
    by_file = Progressive(local=LOCAL, table=load_table(path))
    assert run(by_file)[-1].digest == run(Progressive(RAMP, LOCAL))[-1].digest
