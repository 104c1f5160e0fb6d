"""The sandwich rule: three passes in a step, their costs, and when it is FedAvg."""

import pytest
import torch
import torch.nn.functional as F
from tests.methods.test_laws import NET, are_equal, make_batches, make_state, run_rounds
from tests.methods.test_personal import LOCAL
from tests.methods.tiny_runs import get_last_row, make_update

from pliant.methods import AnyMethod, FedAvg, Sandwich
from pliant.methods.base import TaskKey
from pliant.nn.filter_counts import count_prefix_filters
from pliant.value import decode, encode

METHOD = Sandwich(LOCAL, widths=(0.4, 0.6, 0.8, 1.0))


def list_widths(step, row):
    """Return the widths of a step of device 1 in round 0, the widest first."""
    rows = [row]
    if row:
        rows.append(0)
    if row > 1:
        rows.append(int(TaskKey(0, 0, 1).rng_stream("width", step).integers(1, row)))
    return [METHOD.widths[number] for number in rows]


@pytest.mark.parametrize("row", range(4))
def test_gradients_of_all_widths_are_summed(row):
    state = make_state(METHOD)
    update = make_update(METHOD, NET, state, 1, make_batches(1, 6), row=row)
    params = {name: tensor.clone() for name, tensor in state.params.items()}
    for number, (x, y) in enumerate(make_batches(1, 6)):
        total, target = {}, None
        for width in list_widths(number, row):
            subnet = NET.select_prefix(1 - width)
            small = NET.take(params, subnet)
            names = [name for name in small if name in NET.trainable_names]
            leaves = [small[name].requires_grad_() for name in names]
            output = NET.run(small, subnet, x)
            loss = F.cross_entropy(output, y if target is None else target)
            target = output.detach().softmax(1) if target is None else target
            grads = dict(zip(names, torch.autograd.grad(loss, leaves), strict=True))
            whole = NET.expand({name: params[name] for name in names}, grads, subnet)
            total = {name: total.get(name, 0.0) + grad for name, grad in whole.items()}
        for name, grad in total.items():
            params[name] = params[name] - 0.1 * grad
    widest = NET.select_prefix(1 - METHOD.widths[row])
    before, after = NET.take(state.params, widest), NET.take(params, widest)
    for name in NET.trainable_names:
        torch.testing.assert_close(before[name] + update.delta[name], after[name])


def test_steps_cost_all_their_passes():
    for row in range(4):
        for step in range(5):
            subnets = [NET.select_prefix(1 - width) for width in list_widths(step, row)]
            macs = sum(NET.macs(subnet, training=True) for subnet in subnets)
            assert METHOD.macs(NET, row, TaskKey(0, 0, 1), step) == macs


def test_rows_cost_what_is_expected_of_them():
    full = NET.macs(NET.full, training=True)
    subnets = [NET.select_prefix(1 - width) for width in METHOD.widths]
    a, b, c, d = (NET.macs(subnet, training=True) / full for subnet in subnets)
    shares = METHOD.make_budget_policy(NET).rows.shares
    assert shares == pytest.approx((a, b + a, c + a + b, d + a + (b + c) / 2))
    counts = [[int(mask.sum()) for mask in subnet.masks] for subnet in subnets]
    assert count_prefix_filters(NET, tuple((1 - w,) * 2 for w in METHOD.widths)).tolist() == counts


def test_one_width_is_fedavg():
    assert get_last_row(METHOD, NET) == 3
    sizes = (7, 3, 5)
    single = run_rounds(Sandwich(LOCAL, widths=(1.0,)), sizes=sizes)
    assert are_equal(single, run_rounds(FedAvg(LOCAL), sizes=sizes))
    assert not are_equal(run_rounds(METHOD, sizes=sizes), single)


def test_filters_that_nobody_trained_are_silent():
    state = make_state(METHOD)
    narrow = make_update(METHOD, NET, state, 1, make_batches(1), row=1)
    merged = METHOD.merge(NET, state, [narrow]).params
    used = NET.select_prefix(1 - METHOD.widths[1])
    x = torch.rand(4, 1, 8, 8)
    outputs = [NET.run(NET.take(merged, subnet), subnet, x) for subnet in (NET.full, used)]
    torch.testing.assert_close(*outputs)


def test_it_can_be_encoded_and_decoded():
    assert decode(encode(METHOD), AnyMethod) == METHOD
