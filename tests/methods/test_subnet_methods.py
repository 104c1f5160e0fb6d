"""Methods that train subnets, checked against hand-computed numbers."""

import pytest
import torch
from tests.methods.tiny_runs import (
    PLAIN,
    get_last_row,
    get_weights,
    make_batch,
    make_net,
    make_state,
    make_update,
)
from torch import nn

from pliant.methods import Coherent, Distreal, Elfish, FedDropout, FedRolex, Fjord, HeteroFl
from pliant.methods.aggregation import build_trained_subnet
from pliant.methods.base import TaskKey, Update
from pliant.methods.elfish import ElfishState
from pliant.nn.elastic import elastic
from pliant.nn.models import digits_cnn
from pliant.nn.pareto_table import ParetoTable
from pliant.params import get_params

HALF, FULL = 0, 1
WIDTHS = (0.5, 1.0)


def make_table(net):
    """Make a table of half the filters, or all."""
    return ParetoTable(net.fingerprint, ((0.5,), (0.0,)), (0.5, 1.0))


def run_round(method, round=0):
    """Train half the network on class 0 with x = 2, and all of it on class 1 with x = 4."""
    net = make_net()
    state, last = make_state(net, method), get_last_row(method, net)
    updates = [
        make_update(method, net, state, 0, [make_batch(2)], row=HALF, round=round),
        make_update(method, net, state, 1, [make_batch(4, 1)], row=last, round=round),
    ]
    return net, method.merge(net, state, updates)


def test_fedrolex_moves_the_window_on():
    method = FedRolex(PLAIN, widths=WIDTHS, scaled=False)
    assert get_weights(run_round(method)[1]) == [(1 - 2) / 2, 2.0]  # only device 1 has b
    assert get_weights(run_round(method, round=1)[1]) == [-2.0, (-1 + 2) / 2]  # the half is b
    assert get_weights(run_round(method, round=2)[1]) == [-0.5, 2.0]


def test_the_scaler_compensates_for_dropped_filters():
    # the logit is 2·a·x: its step from 0 is twice as long
    assert get_weights(run_round(FedRolex(PLAIN, widths=WIDTHS))[1]) == [(2 - 2) / 2, 2.0]


def test_heterofl_averages_over_the_devices_that_hold_a_coordinate():
    net, state = run_round(HeteroFl(PLAIN, s=0.5, levels=2, scaled=False))
    assert get_weights(state) == [-0.5, 2.0]
    assert build_trained_subnet(net, state) is None


def test_heterofl_reports_which_filters_were_ever_trained():
    net, method = make_net(), HeteroFl(PLAIN, s=0.5, levels=2)
    state = make_state(net, method)
    state = method.merge(net, state, [make_update(method, net, state, 0, [make_batch(2)])])
    trained = build_trained_subnet(net, state)
    assert [mask.tolist() for mask in trained.masks] == [[True, False]]
    assert trained.scales == (1.0,)
    update = make_update(method, net, state, 0, [make_batch(2)], row=FULL)
    assert build_trained_subnet(net, method.merge(net, state, [update])) is None


def test_heterofl_has_levels_or_all_widths_between():
    net = make_net()
    assert HeteroFl(s=0.5, levels=2).make_budget_policy(net).rows.shares[-1] == 1.0
    assert len(HeteroFl(s=0.7).make_budget_policy(net).rows.shares) == 5
    assert len(HeteroFl(s=0.7, fine=True).make_budget_policy(net).rows.shares) > 100


@pytest.mark.parametrize(("merging", "b"), [("counts", 2.0), ("mean", 1.0)])
def test_feddropout_averages_per_coordinate_or_over_all_devices(merging, b):
    net, method = make_net(), FedDropout(PLAIN, min_width=0.5, scaled=False, merging=merging)
    device = next(
        d for d in range(9) if method.subnet_to_send(net, HALF, TaskKey(0, 0, d)).masks[0][0]
    )
    state, last = make_state(net, method), get_last_row(method, net)
    updates = [
        make_update(method, net, state, device, [make_batch(2)], row=HALF),
        make_update(method, net, state, 10, [make_batch(4, 1)], row=last),
    ]
    assert get_weights(method.merge(net, state, updates)) == [-0.5, b]


@pytest.mark.parametrize(
    ("weighting", "first", "second"), [("equal", 1, 1), ("samples", 7, 15), ("macs", 7, 15)]
)
@pytest.mark.parametrize("method", [FedDropout, HeteroFl, FedRolex])
def test_an_interrupted_device_counts_by_its_work_unless_devices_count_equally(
    method, weighting, first, second
):
    net = make_net()
    method = method(PLAIN, scaled=False, weighting=weighting)
    state, last = make_state(net, method), get_last_row(method, net)
    # 7 and 15 mini-batches, of which only the first has a gradient
    short, long = [make_batch(2)] + 6 * [make_batch(0)], [make_batch(4, 1)] + 14 * [make_batch(0)]
    updates = [
        make_update(method, net, state, 0, short, row=last),
        make_update(method, net, state, 1, long, row=last),
    ]
    expected = (first * 1 - second * 2) / (first + second)
    weights = get_weights(method.merge(net, state, updates))
    assert weights == pytest.approx([expected, -expected])


def test_samples_count_per_coordinate():
    net, method = make_net(), HeteroFl(PLAIN, s=0.5, levels=2, scaled=False, weighting="samples")
    state = make_state(net, method)
    updates = [
        make_update(method, net, state, 0, [make_batch(2, 0, 3)], row=HALF),
        make_update(method, net, state, 1, [make_batch(4, 1)], row=FULL),
    ]
    assert get_weights(method.merge(net, state, updates)) == [(3 * 1 - 2) / 4, 2.0]


def test_feddropout_draws_filters_per_device_or_per_round():
    net = make_net()
    keys = [TaskKey(0, round, device) for round in range(5) for device in range(5)]

    def draw_masks(method):
        return [tuple(method.subnet_to_send(net, HALF, key).masks[0].tolist()) for key in keys]

    per_device = draw_masks(FedDropout(min_width=0.5))
    per_round = draw_masks(FedDropout(min_width=0.5, masks="round"))
    assert len(set(per_device[:5])) == 2
    assert len(set(per_round)) == 2
    assert all(len(set(per_round[5 * round : 5 * round + 5])) == 1 for round in range(5))


def test_fjord_weights_by_samples_over_the_devices_that_hold_a_coordinate():
    net, method = make_net(), Fjord(PLAIN, widths=WIDTHS)
    state = make_state(net, method)
    updates = [make_update(method, net, state, 0, [make_batch(2, 0, 3)], row=HALF)]
    device = next(
        d for d in range(1, 9) if method.select_subnet(net, FULL, TaskKey(0, 0, d), 0) is net.full
    )
    updates.append(make_update(method, net, state, device, [make_batch(4, 1)], row=FULL))
    assert get_weights(method.merge(net, state, updates)) == [(3 * 1 - 2) / 4, 2.0]


def test_fjord_samples_widths_up_to_the_devices_own():
    net, method = make_net(), Fjord(widths=WIDTHS)
    for row, expected in ((FULL, {(1,), (2,)}), (HALF, {(1,)})):
        subnets = [method.select_subnet(net, row, TaskKey(0, 0, 3), step) for step in range(20)]
        assert {subnet.counts for subnet in subnets} == expected
    half, full = (net.macs(net.select_prefix(rate), training=True) for rate in (0.5, 0.0))
    assert method.make_budget_policy(net).rows.shares == (half / full, (half / full + 1) / 2)


def test_fjord_lets_the_widest_network_teach_the_sampled_one():
    net, method = make_net(), Fjord(PLAIN, widths=WIDTHS, distilled=True)
    device = next(
        d for d in range(9) if method.select_subnet(net, FULL, TaskKey(0, 0, d), 0) is not net.full
    )
    # the teacher's step is (1, -1); its targets of 1/2 are what the student predicts already
    update = make_update(method, net, make_state(net, method), device, [make_batch(2)], row=FULL)
    assert update.delta["0.weight"].flatten().tolist() == [1.0, -1.0]
    macs = method.macs(net, HALF, TaskKey(0, 0, device), 0)
    assert macs == 2 * net.macs(net.select_prefix(0.5), training=True)  # both passes are charged


def test_distillation_moves_the_sampled_network_towards_the_widest_one():
    net, method = make_net(), Fjord(PLAIN, widths=WIDTHS, distilled=True)
    state = make_state(net, method)
    state.params["0.weight"][1] = -2.0  # logits 0 and -4: the teacher predicts p = 1 / (1 + e^-4)
    device = next(
        d for d in range(9) if method.select_subnet(net, FULL, TaskKey(0, 0, d), 0) is not net.full
    )
    update = make_update(method, net, state, device, [make_batch(2)], row=FULL)
    p = 1 / (1 + torch.tensor(-4.0).exp())
    # both gradients move a: by 2·(1 - p) for the label, by 2·(p - 1/2) for the teacher's targets
    torch.testing.assert_close(update.delta["0.weight"][0, 0, 0, 0], torch.tensor(1.0))
    torch.testing.assert_close(update.delta["0.weight"][1, 0, 0, 0], -2 * (1 - p))


def test_dynamic_fjord_uses_the_width_that_fits_now():
    net, method = make_net(), Fjord(PLAIN, widths=WIDTHS, dynamic=True)
    assert not method.make_budget_policy(net).is_per_round
    state = make_state(net, method)
    updates = [
        make_update(method, net, state, 0, [make_batch(2), make_batch(0)], rows=[HALF, HALF]),
        make_update(method, net, state, 1, [make_batch(4, 1), make_batch(0)], rows=[FULL, HALF]),
    ]
    assert get_weights(method.merge(net, state, updates)) == [-0.5, 2.0]
    assert updates[0].delta["0.weight"].shape == (2, 1, 1, 1)


def test_fjord_cannot_be_both_dynamic_and_distilled():
    with pytest.raises(ValueError, match="not both"):
        Fjord(dynamic=True, distilled=True)


def test_elfish_weights_a_device_by_the_share_of_filters_it_trained():
    _, state = run_round(Elfish(PLAIN, min_width=0.5))
    # device 0 has trained one of two filters: its weight is a half, and its masked one is unchanged
    torch.testing.assert_close(get_weights(state), [(0.5 - 2) / 1.5, 2 / 1.5])
    contributions = Elfish().broadcast(state)["0"]
    torch.testing.assert_close(contributions.tolist(), [1.0, 2 / 1.5])


class _Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 1, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x):
        left, right = self.conv(x).chunk(2, 1)
        return self.head((left * right).mean((2, 3)))


def test_elfish_adds_what_parts_with_one_mask_moved():
    net = elastic(_Gated(), torch.zeros(1, 1, 2, 2))
    assert net.sizes == (2,)
    params = get_params(net.module)
    delta = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
    delta["conv.weight"] = torch.tensor([3.0, 5.0, 4.0, 12.0]).view(4, 1, 1, 1)
    update = Update(0, delta, 2, 1, 1.0, 0.0, subnet_steps=((net.full, 1),))
    state = Elfish().merge(net, ElfishState(params), [update])
    assert Elfish().broadcast(state)["0"].tolist() == [5.0, 13.0]


def test_elfish_keeps_what_moved_most_and_rotates_the_rest():
    net = make_net()
    state = ElfishState(get_params(net.module), {"0": torch.tensor([0.1, 0.7])})

    def select_mask(top, round):
        method = Elfish(PLAIN, min_width=0.5, top=top)
        update = make_update(method, net, state, 0, [make_batch(2)], row=HALF, round=round)
        return update.subnet_steps[0][0].masks[0].tolist()

    assert [select_mask(1.0, round) for round in range(3)] == [[False, True]] * 3  # b moved most
    rotation = [select_mask(0.0, round) for round in range(4)]
    assert rotation == [[True, False], [False, True]] * 2


def make_two_updates(method, net, state):
    """Train a alone, then both without a gradient on one device, and both on the other."""
    device = next(
        d
        for d in range(30)
        if method.select_subnet(net, HALF, TaskKey(0, 0, d), 0).masks[0].tolist() == [True, False]
    )
    first = [make_batch(1), make_batch(0, 0)]
    second = [make_batch(4, 1), make_batch(0, 0, 2)]
    return [
        make_update(method, net, state, device, first, rows=[HALF, FULL]),
        make_update(method, net, state, 40, second, rows=[FULL, FULL]),
    ]


@pytest.mark.parametrize(
    ("merging", "expected"),
    [  # the deltas are (1, 0) and (-2, 2): the half's logit counts double
        ("macs", [(1.5 * 1 + 3 * -2) / 4.5, 3 * 2 / 4.5]),  # the half's step costs a half
        ("samples", [(2 * 1 + 3 * -2) / 5, 3 * 2 / 5]),
        ("counts", [(1 - 2) / 2, 2 / 1.5]),  # b: trained in half of the steps of device 0
    ],
)
@pytest.mark.parametrize("filters", ["batch", "round"])
def test_distreal_merges_by_macs_samples_or_counts(merging, expected, filters):
    net = make_net()
    method = Distreal(make_table(net), PLAIN, filters=filters, merging=merging)
    updates = make_two_updates(method, net, make_state(net, method))
    state = method.merge(net, make_state(net, method), updates)
    torch.testing.assert_close(get_weights(state), expected)


def test_distreal_draws_filters_per_mini_batch_or_keeps_an_order_for_the_round():
    net, key = make_net(), TaskKey(0, 0, 1)
    method = Distreal(make_table(net))
    masks = {tuple(method.select_subnet(net, HALF, key, step).masks[0]) for step in range(20)}
    assert len(masks) == 2 or len(masks) == 3
    ordered = Distreal(make_table(net), filters="round")
    first = ordered.select_subnet(net, HALF, key, 0)
    assert all(ordered.select_subnet(net, HALF, key, step) is first for step in range(20))


def test_distreal_sends_a_packed_subnet_only_if_it_cannot_change():
    net = make_net()
    subnets = {
        (filters, adapts): Distreal(make_table(net), filters=filters, adapts=adapts).subnet_to_send(
            net, HALF, TaskKey(0, 0, 0)
        )
        for filters in ("batch", "round")
        for adapts in (True, False)
    }
    assert [key for key, subnet in subnets.items() if subnet is not None] == [("round", False)]


def test_distreal_can_use_equal_rates_instead_of_its_table():
    net = make_net()
    table = make_table(net)
    assert len(Distreal(table).make_budget_policy(net).rows.shares) == 2
    assert len(Distreal(table, rates="uniform").make_budget_policy(net).rows.shares) == 64


def test_ordered_filters_are_charged_as_whole_filters():
    net = make_net()  # 0.4 of two filters, rounded up, is one filter: 0.9 is both
    table = ParetoTable(net.fingerprint, ((0.6,), (0.1,), (0.0,)), (0.4, 0.9, 1.0))
    half = net.macs(net.select_prefix(0.5), training=True) / net.macs(net.full, training=True)
    assert Coherent(table).make_budget_policy(net).rows.shares == (half, 1.0, 1.0)
    assert Distreal(table).make_budget_policy(net).rows.shares == (0.4, 0.9, 1.0)


@pytest.mark.parametrize("filters", ["round", "prefix"])
def test_coherent_weights_a_coordinate_by_its_steps(filters):
    net = make_net()
    method = Coherent(make_table(net), PLAIN, filters=filters)
    updates = make_two_updates(method, net, make_state(net, method))
    state = method.merge(net, make_state(net, method), updates)
    torch.testing.assert_close(get_weights(state), [-0.5, 2 / 1.5])
    assert build_trained_subnet(net, state) is None


def test_modules_are_equal_parts_of_every_site():
    net = elastic(digits_cnn(), torch.zeros(1, 1, 28, 28))  # sites of 12 and 24 filters
    filters = HeteroFl(modules=4).max_filters(net)
    assert filters.tolist() == [[3, 6], [6, 12], [9, 18], [12, 24]]
    assert HeteroFl(modules=1).max_filters(net).tolist() == [[12, 24]]
    with pytest.raises(ValueError, match="Expected `fine` or `modules`, got both"):
        HeteroFl(fine=True, modules=4)
