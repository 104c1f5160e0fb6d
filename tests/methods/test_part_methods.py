"""Methods that train parts of the network, by numbers that one can do on paper."""

import pytest
import torch
from tiny import PLAIN, answer, last_row, pixel, start, two_weights, weights

from pliant.explore import Table
from pliant.methods import Coherent, Distreal, Elfish, FedDropout, FedRolex, Fjord, HeteroFl
from pliant.methods.base import SENT, Place

HALF, WHOLE = 0, 1
WIDTHS = (0.5, 1.0)


def table(net):
    """Half the filters, or all."""
    return Table(net.fingerprint, ((0.5,), (0.0,)), (0.5, 1.0))


def merged(method, *answers, round=0):
    """Device 0 trains a half on class 0 with x = 2, device 1 all on class 1 with x = 4."""
    net = two_weights()
    state = start(net)
    updates = [
        answer(method, net, state, 0, [pixel(2)], row=HALF, round=round),
        answer(method, net, state, 1, [pixel(4, 1)], row=last_row(method, net), round=round),
    ]
    return net, method.merge(net, state, updates), updates


def test_fedrolex_rolls_the_window_on():
    method = FedRolex(PLAIN, widths=WIDTHS, scaled=False)
    assert weights(merged(method)[1]) == [(1 - 2) / 2, 2.0]  # only device 1 has b
    assert weights(merged(method, round=1)[1]) == [-2.0, (-1 + 2) / 2]  # the half is b
    assert weights(merged(method, round=2)[1]) == [-0.5, 2.0]


def test_the_scaler_lets_a_half_stand_for_the_whole():
    # the logit is 2·a·x: its step from 0 is twice as long
    assert weights(merged(FedRolex(PLAIN, widths=WIDTHS))[1]) == [(2 - 2) / 2, 2.0]


def test_heterofl_averages_over_those_who_have_it():
    net, state, _ = merged(HeteroFl(PLAIN, s=0.5, levels=2, scaled=False))
    assert weights(state) == [-0.5, 2.0]
    assert HeteroFl(PLAIN).widest(net, state) is None


def test_heterofl_tells_which_filters_were_ever_trained():
    net, method = two_weights(), HeteroFl(PLAIN, s=0.5, levels=2)
    state = method.merge(net, start(net), [answer(method, net, start(net), 0, [pixel(2)])])
    widest = method.widest(net, state)
    assert [mask.tolist() for mask in widest.masks] == [[True, False]]
    assert widest.scales == (1.0,)
    state = method.merge(net, state, [answer(method, net, state, 0, [pixel(2)], row=WHOLE)])
    assert method.widest(net, state) is None


def test_heterofl_has_levels_or_all_widths_between():
    net = two_weights()
    assert HeteroFl(s=0.5, levels=2).plan(net).rows.shares[-1] == 1.0
    assert len(HeteroFl(s=0.7).plan(net).rows.shares) == 5
    assert len(HeteroFl(s=0.7, fine=True).plan(net).rows.shares) > 100


@pytest.mark.parametrize(("merging", "b"), [("counts", 2.0), ("mean", 1.0)])
def test_feddropout_counts_per_coordinate_or_not(merging, b):
    net, method = two_weights(), FedDropout(PLAIN, least=0.5, scaled=False, merging=merging)
    device = next(d for d in range(9) if method.sends(net, HALF, Place(0, 0, d)).masks[0][0])
    updates = [
        answer(method, net, start(net), device, [pixel(2)], row=HALF),
        answer(method, net, start(net), 10, [pixel(4, 1)], row=last_row(method, net)),
    ]
    assert weights(method.merge(net, start(net), updates)) == [-0.5, b]


def test_feddropout_draws_for_each_device_and_round_or_for_a_round():
    net = two_weights()

    def drawn(method):
        places = [Place(0, round, device) for round in range(5) for device in range(5)]
        masks = [tuple(method.sends(net, HALF, place).masks[0].tolist()) for place in places]
        return masks

    own, common = drawn(FedDropout(least=0.5)), drawn(FedDropout(least=0.5, masks="round"))
    assert len(set(own[:5])) == 2
    assert len(set(common)) == 2
    assert all(len(set(common[5 * round : 5 * round + 5])) == 1 for round in range(5))


def test_fjord_weighs_by_samples_over_those_who_have_it():
    net, method = two_weights(), Fjord(PLAIN, widths=WIDTHS)
    state = start(net)
    updates = [answer(method, net, state, 0, [pixel(2, 0, 3)], row=HALF)]
    device = next(
        d for d in range(1, 9) if method.subnet(net, WHOLE, Place(0, 0, d), 0) is net.full
    )
    updates.append(answer(method, net, state, device, [pixel(4, 1)], row=WHOLE))
    assert weights(method.merge(net, state, updates)) == [(3 * 1 - 2) / 4, 2.0]


def test_fjord_draws_widths_up_to_the_devices_own():
    net, method = two_weights(), Fjord(widths=WIDTHS)
    drawn = {method.subnet(net, WHOLE, Place(0, 0, 3), step).counts for step in range(20)}
    assert drawn == {(1,), (2,)}
    assert {method.subnet(net, HALF, Place(0, 0, 3), step).counts for step in range(20)} == {(1,)}
    half, full = (net.macs(net.first(rate), training=True) for rate in (0.5, 0.0))
    assert method.plan(net).rows.shares == (half / full, (half / full + 1) / 2)


def test_fjord_lets_the_wide_network_teach_the_drawn_one():
    net, method = two_weights(), Fjord(PLAIN, widths=WIDTHS, distilled=True)
    device = next(
        d for d in range(9) if method.subnet(net, WHOLE, Place(0, 0, d), 0) is not net.full
    )
    # the teacher's step is (1, -1); it teaches 1/2 to 1/2, which the half already says
    update = answer(method, net, start(net), device, [pixel(2)], row=WHOLE)
    assert update.change["0.weight"].flatten().tolist() == [1.0, -1.0]
    # where both are the whole network and b is -1, the teacher's lesson is no news either
    one = method.macs(net, HALF, Place(0, 0, device), 0)
    assert one == 2 * net.macs(net.first(0.5), training=True)  # both passes are charged


def test_distilling_moves_the_drawn_network_to_what_the_wide_one_says():
    net, method = two_weights(), Fjord(PLAIN, widths=WIDTHS, distilled=True)
    state = start(net)
    state.params["0.weight"][1] = -2.0  # logits 0 and -4: the teacher says p = 1 / (1 + e^-4)
    device = next(
        d for d in range(9) if method.subnet(net, WHOLE, Place(0, 0, d), 0) is not net.full
    )
    update = answer(method, net, state, device, [pixel(2)], row=WHOLE)
    said = 1 / (1 + torch.tensor(-4.0).exp())
    # both steps move a: by 2·(1 - p) for the label, by 2·(p - 1/2) for the lesson
    torch.testing.assert_close(update.change["0.weight"][0, 0, 0, 0], torch.tensor(1.0))
    torch.testing.assert_close(update.change["0.weight"][1, 0, 0, 0], -2 * (1 - said))


def test_dynamic_fjord_takes_the_width_of_the_moment():
    net, method = two_weights(), Fjord(PLAIN, widths=WIDTHS, dynamic=True)
    assert not method.plan(net).is_held
    state = start(net)
    updates = [
        answer(method, net, state, 0, [pixel(2), pixel(0)], rows=[HALF, HALF]),
        answer(method, net, state, 1, [pixel(4, 1), pixel(0)], rows=[WHOLE, HALF]),
    ]
    assert weights(method.merge(net, state, updates)) == [-0.5, 2.0]
    assert updates[0].change["0.weight"].shape == (2, 1, 1, 1)


def test_fjord_is_not_both_dynamic_and_distilled():
    with pytest.raises(ValueError, match="not both"):
        Fjord(dynamic=True, distilled=True)


def test_elfish_counts_a_device_by_the_share_of_filters_that_it_trained():
    _, state, _ = merged(Elfish(PLAIN, least=0.5))
    # device 0 has trained one of two filters: it counts half, and its masked one is unchanged
    torch.testing.assert_close(weights(state), [(0.5 - 2) / 1.5, 2 / 1.5])
    moved = state.extra[SENT]["0"]
    torch.testing.assert_close(moved.tolist(), [1.0, 2 / 1.5])


def test_elfish_keeps_what_moved_most_and_rotates_the_rest():
    net, method = two_weights(), Elfish(PLAIN, least=0.5, top=1.0)
    state = start(net)
    state = type(state)(state.params, {SENT: {"0": torch.tensor([0.1, 0.7])}})
    for round in range(3):  # b moved most
        update = answer(method, net, state, 0, [pixel(2)], row=HALF, round=round)
        assert update.trained[0][0].masks[0].tolist() == [False, True]
    rotating = Elfish(PLAIN, least=0.5, top=0.0)
    masks = [
        answer(rotating, net, state, 0, [pixel(2)], row=HALF, round=round).trained[0][0].masks[0]
        for round in range(4)
    ]
    assert [mask.tolist() for mask in masks] == [[True, False], [False, True]] * 2


def distreal_answers(method, net, state):
    """Device 0: a alone, then both without a gradient. Device 1: both."""
    device = next(
        d
        for d in range(30)
        if method.subnet(net, HALF, Place(0, 0, d), 0).masks[0].tolist() == [True, False]
    )
    return [
        answer(method, net, state, device, [pixel(1), pixel(0, 0)], rows=[HALF, WHOLE]),
        answer(method, net, state, 40, [pixel(4, 1), pixel(0, 0, 2)], rows=[WHOLE, WHOLE]),
    ]


@pytest.mark.parametrize(
    ("merging", "wanted"),
    [  # the changes are (1, 0) and (-2, 2): the half's logit counts double
        ("macs", [(1.5 * 1 + 3 * -2) / 4.5, 3 * 2 / 4.5]),  # the half's step costs a half
        ("samples", [(2 * 1 + 3 * -2) / 5, 3 * 2 / 5]),
        ("counts", [(1 - 2) / 2, 2 / 1.5]),  # b: trained in half of the steps of device 0
    ],
)
@pytest.mark.parametrize("filters", ["batch", "round"])
def test_distreal_merges_by_macs_samples_or_counts(merging, wanted, filters):
    net = two_weights()
    method = Distreal(table(net), PLAIN, filters=filters, merging=merging)
    updates = distreal_answers(method, net, start(net))
    state = method.merge(net, start(net), updates)
    torch.testing.assert_close(weights(state), wanted)


def test_distreal_draws_anew_or_keeps_an_order_for_the_round():
    net = two_weights()
    method = Distreal(table(net))
    drawn = {tuple(method.subnet(net, HALF, Place(0, 0, 1), s).masks[0]) for s in range(20)}
    assert len(drawn) == 2 or len(drawn) == 3
    put = Distreal(table(net), filters="round")
    assert all(
        put.subnet(net, HALF, Place(0, 0, 1), step) is put.subnet(net, HALF, Place(0, 0, 1), 0)
        for step in range(20)
    )


def test_distreal_is_sent_packed_only_when_nothing_can_change():
    net = two_weights()
    sent = {
        (filters, adapts): Distreal(table(net), filters=filters, adapts=adapts).sends(
            net, HALF, Place(0, 0, 0)
        )
        for filters in ("batch", "round")
        for adapts in (True, False)
    }
    assert [key for key, subnet in sent.items() if subnet is not None] == [("round", False)]


def test_distreal_can_leave_its_table_for_equal_rates():
    net = two_weights()
    assert len(Distreal(table(net)).plan(net).rows.shares) == 2
    assert len(Distreal(table(net), rates="uniform").plan(net).rows.shares) == 64


def test_rows_of_whole_filters_are_priced_as_what_they_are():
    net = two_weights()  # 0.4 of two filters, rounded up, is one filter: 0.9 is both
    rows = Table(net.fingerprint, ((0.6,), (0.1,), (0.0,)), (0.4, 0.9, 1.0))
    half = net.macs(net.first(0.5), training=True) / net.macs(net.full, training=True)
    assert Coherent(rows).plan(net).rows.shares == (half, 1.0, 1.0)
    assert Distreal(rows).plan(net).rows.shares == (0.4, 0.9, 1.0)


@pytest.mark.parametrize("filters", ["round", "prefix"])
def test_coherent_counts_the_steps_of_a_coordinate(filters):
    net = two_weights()
    method = Coherent(table(net), PLAIN, filters=filters)
    updates = distreal_answers(method, net, start(net))
    state = method.merge(net, start(net), updates)
    torch.testing.assert_close(weights(state), [-0.5, 2 / 1.5])
    assert method.widest(net, state) is None
