import math
from dataclasses import dataclass, replace
from functools import cache
from typing import get_args
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch
from bad_updates import BAD, LIES

from pliant.data import Iid, Images
from pliant.data.federated import Source
from pliant.devices import Changing, Fleet
from pliant.engine import ledger, simulate
from pliant.engine.expected import Expected
from pliant.engine.job import Job, sent
from pliant.engine.rules import Rules
from pliant.methods import AnyMethod, FedAvg
from pliant.methods.base import Local, Place, State, Update
from pliant.methods.guard import Manifest, Policy, admitted, inspect, specs
from pliant.nn.elastic import elastic
from pliant.nn.models import digits_cnn_bn
from pliant.params import digest, is_finite, params_of
from pliant.record import read
from pliant.value import decode

METHODS = {kind.__struct_config__.tag: kind for kind in get_args(AnyMethod)}
DEVICES = 4
SETTING = simulate.Setting(rounds=1, per_round=DEVICES, rules=Rules(late="partial"))


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return digits_cnn_bn(5, filters=(4, 6), hidden=8, side=16)


@cache
def data():
    draws = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (140, 1, 16, 16), generator=draws, dtype=torch.uint8)
    images = Images.from_tensors(pixels, torch.arange(140) % 5, classes=5)
    return Source(images, images).share(Iid(), DEVICES, proxy=20)


def small(kind):
    """Make a method with its defaults, but for small batches."""
    method = kind()
    return msgspec.structs.replace(
        method, local=msgspec.structs.replace(method.local, batch=8, epochs=1)
    )


def run(method, setting=SETTING, folder=None):
    fleet = Fleet(size=DEVICES, speed=Changing(low=0.5, high=1.0, per_round=2.0))
    return list(simulate.simulate(method, network(), data(), fleet, setting=setting, folder=folder))


@dataclass(frozen=True, eq=False)
class Round:
    """A real round as the guard saw it."""

    method: object
    net: object
    updates: dict
    manifests: dict

    def merged(self, updates):
        state = self.method.merge(self.net, State(params_of(self.net.net)), updates)
        assert is_finite(state.params)
        every = {f"{key}/{name}": t for key, ps in state.extra.items() for name, t in ps.items()}
        return digest({**state.params, **every}), state.params

    @cache  # noqa: B019  # one for each method
    def without(self, device):
        return self.merged([u for d, u in sorted(self.updates.items()) if d != device])


@cache
def dispatched(tag):
    """Run one round of a method and keep what the devices sent and what was expected."""
    seen = []

    def spy(replies, manifests, policy):
        seen.append((dict(replies), manifests))
        return admitted(seen[-1][0].items(), manifests, policy)

    method = small(METHODS[tag])
    with patch.object(simulate, "admitted", spy):
        run(method)
    net = elastic(network(), data().train.normalised(slice(0, 1)))
    return Round(method, net, *seen[0])


def guarded(tag, device, spoiled):
    """Return what a round admits and refuses when one device sends something else."""
    found = dispatched(tag)
    replies = [(d, spoiled if d == device else update) for d, update in found.updates.items()]
    return found, *admitted(replies, found.manifests, Policy())


def test_there_are_forty_kinds_of_bad_updates():
    assert len(BAD) >= 40


@pytest.mark.parametrize("tag", METHODS)
def test_honest_updates_are_admitted_as_they_are(tag):
    found = dispatched(tag)
    updates, refused = admitted(reversed(found.updates.items()), found.manifests, Policy())
    assert refused == {}
    assert [update.device for update in updates] == list(range(DEVICES))
    assert all(update is found.updates[update.device] for update in updates)
    assert found.merged(updates)[0] != found.without(1)[0]  # it would show who is missing


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("tag", METHODS)
def test_a_bad_update_is_refused_by_name_as_if_it_had_never_come(tag, bad):
    honest = dispatched(tag).updates[1]
    found, updates, refused = guarded(tag, 1, BAD[bad](honest))
    assert list(refused) == [1]
    assert refused[1].startswith("device 1: expected ")
    assert ", got " in refused[1]
    assert "\n" not in refused[1]
    assert len(refused[1]) < 300
    assert found.merged(updates)[0] == found.without(1)[0]


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("tag", METHODS)
def test_lying_about_compute_never_weighs_more_than_honest_work_at_full_rate(tag, lie):
    honest = dispatched(tag).updates[1]
    most = sum(dispatched(tag).manifests[1].macs)
    found, updates, refused = guarded(tag, 1, replace(honest, macs=LIES[lie](most)))
    assert refused[1].startswith("device 1: expected MACs above 0 and up to ")
    assert found.merged(updates)[0] == found.without(1)[0]


@pytest.mark.parametrize("tag", METHODS)
def test_all_that_is_possible_may_be_claimed(tag):
    found = dispatched(tag)
    claimed = replace(found.updates[1], macs=sum(found.manifests[1].macs))
    assert inspect(claimed, found.manifests[1], Policy()) is None


@pytest.mark.parametrize("tag", METHODS)
def test_a_round_of_bad_updates_only_leaves_the_network_as_it_is(tag):
    found = dispatched(tag)
    replies = [(device, None) for device in found.updates]
    updates, refused = admitted(replies, found.manifests, Policy())
    assert (updates, sorted(refused)) == ([], list(range(DEVICES)))
    _, params = found.merged(updates)
    assert digest(params) == digest(params_of(network()))


WANTED = Manifest(3, (8, 8, 4), (80.0, 80.0, 40.0), specs({"weight": torch.zeros(2)}))
GOOD = Update(3, {"weight": torch.tensor([3.0, 4.0])}, 16, 2, 160.0, 0.5)


def test_reasons_say_what_was_expected_and_what_was_got():
    def reason(**claims):
        return inspect(replace(GOOD, **claims), WANTED, Policy())

    assert inspect(GOOD, WANTED, Policy()) is None
    assert reason(loss=None) is None
    assert reason(steps=4) == "device 3: expected 1 to 3 steps, got 4"
    assert reason(samples=17) == "device 3: expected 1 to 16 samples in 2 steps, got 17"
    assert reason(macs=160.5) == (
        "device 3: expected MACs above 0 and up to 160.0 for 2 mini-batches, got 160.5"
    )
    assert reason(change={"weight": torch.tensor([math.nan, 1.0])}) == (
        "device 3: expected change 'weight' of finite numbers, got 1 that are not"
    )
    assert reason(change={"weight": torch.zeros(2), "x" * 999: 1}).endswith("x…'")


def test_a_device_that_did_more_may_claim_more():
    more = replace(GOOD, steps=3, samples=20, macs=200.0)
    assert inspect(more, WANTED, Policy()) is None
    assert inspect(replace(more, steps=2), WANTED, Policy()) is not None


def test_a_long_change_is_refused_or_clipped():
    assert inspect(GOOD, WANTED, Policy(norm=5.0)) is None
    assert inspect(GOOD, WANTED, Policy(norm=1.0)) == (
        "device 3: expected a change of norm up to 1, got 5"
    )
    [clipped], refused = admitted([(3, GOOD)], {3: WANTED}, Policy(norm=1.0, clip=True))
    assert refused == {}
    assert torch.allclose(clipped.change["weight"], torch.tensor([0.6, 0.8]))
    assert torch.equal(GOOD.change["weight"], torch.tensor([3.0, 4.0]))
    [short], _ = admitted([(3, GOOD)], {3: WANTED}, Policy(norm=9.0, clip=True))
    assert short is GOOD


def test_policies_are_read_from_plain_data():
    assert decode({"norm": 5, "clip": True}, Policy) == Policy(norm=5.0, clip=True)
    with pytest.raises(ValueError, match=r"Expected a norm to clip to - at `\$.norm` of Policy"):
        Policy(clip=True)
    with pytest.raises(ValueError, match=r"Expected `float` > 0.0"):
        Policy(norm=0.0)


def test_two_replies_of_one_device_are_none():
    other = replace(WANTED, device=5)
    updates, refused = admitted(
        [(5, replace(GOOD, device=5)), (3, GOOD), (3, GOOD)], {3: WANTED, 5: other}, Policy()
    )
    assert [update.device for update in updates] == [5]
    assert refused == {3: "device 3: expected one reply, got 2"}


def test_a_device_without_a_task_is_not_heard():
    updates, refused = admitted([(9, replace(GOOD, device=9)), (3, GOOD)], {3: WANTED}, Policy())
    assert [update.device for update in updates] == [3]
    assert refused == {9: "device 9: expected no reply, as it was sent no task, got one"}


class Nasty:
    """An object that fails whatever is asked of it."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __len__ = __bool__ = __abs__ = __getattr__
    __hash__ = object.__hash__


JUNK = [Nasty(), np.zeros(3), torch.zeros(3), {}, [], b"", "", -1.5, 10**400, {"weight": Nasty()}]


@pytest.mark.parametrize("place", ["device", "change", "samples", "steps", "macs", "loss"])
def test_no_object_whatever_raises(place):
    for junk in JUNK:
        if place == "loss" and type(junk) in (int, float):
            continue  # any finite number may be a loss
        assert "expected" in inspect(replace(GOOD, **{place: junk}), WANTED, Policy())


class Packed:
    """A method that sends half of the filters and gets one for every number of them."""

    local = Local(batch=8)

    def sends(self, net, row, place):
        return net.first(0.5, net.rolled(place.device))

    def train(self, net, task, steps):
        change = {name: torch.ones_like(tensor) for name, tensor in task.params.items()}
        extra = {"share/0.weight": torch.ones(2)}
        trained = ((task.subnet, 1),)
        return Update(
            task.place.device, change, 8, 1, 1.0, 0.0, task.subnet, extra, trained=trained
        )


@pytest.fixture(scope="module")
def packed():
    net = elastic(network(), data().train.normalised(slice(0, 1)))
    expected = Expected(Packed(), net)
    job = Job(Place(0, 0, 1), (0,), (1.0,), 0.1, {})
    params = params_of(net.net)
    wanted = expected.manifest(params, job, (8,), (9.0,))
    task = sent(Packed(), net, params, job)
    return net, wanted, Packed().train(net, task, ())


def test_a_packed_update_must_have_the_shapes_of_its_sub_network(packed):
    net, wanted, update = packed
    assert inspect(update, wanted, Policy()) is None
    assert wanted.change["features.0.weight"].shape == (2, 1, 5, 5)
    whole = replace(update, change=params_of(net.net))
    assert "of shape (2, 1, 5, 5), got (4, 1, 5, 5)" in inspect(whole, wanted, Policy())


def test_a_packed_update_must_belong_to_the_filters_that_were_sent(packed):
    net, wanted, update = packed
    copied = replace(update, subnet=Packed().sends(net, 0, Place(0, 0, 1)))
    assert inspect(copied, wanted, Policy()) is None
    others = [net.first(0.5), net.full, None, replace(update.subnet, masks=None), "all"]
    others += [replace(update.subnet, network="x"), replace(update.subnet, scales=(9.0,) * 2)]
    for other in others:
        assert "the sub-network that it was sent" in inspect(
            replace(update, subnet=other), wanted, Policy()
        )


def test_what_was_trained_must_be_sub_networks_that_make_up_the_steps(packed):
    net, wanted, update = packed
    half = net.first(0.5)
    empty = replace(half, masks=tuple(mask & False for mask in half.masks))
    longer = replace(half, masks=tuple(np.ones(len(mask) + 1, np.bool_) for mask in half.masks))
    scales = replace(half, scales=(math.nan, 1.0))
    assert inspect(replace(update, trained=((half, 1),)), wanted, Policy()) is None
    for odd in (empty, longer, scales, replace(half, network="x"), replace(half, masks=7), "half"):
        assert "sub-networks of this network that were trained, got another" in inspect(
            replace(update, trained=((odd, 1),)), wanted, Policy()
        )
    for odd in ((), ((half, 2),), ((half, 1), (half, 1))):
        assert "sub-networks for 1 steps, got them for" in inspect(
            replace(update, trained=odd), wanted, Policy()
        )
    for odd in (None, [(half, 1)], ((half, True),), ((half, 0), (half, 1)), (half,)):
        assert "what was trained as" in inspect(replace(update, trained=odd), wanted, Policy())


def test_what_is_sent_beside_the_change_is_checked_too(packed):
    _, wanted, update = packed
    assert "extra 'share/0.weight', got none" in inspect(
        replace(update, extra={}), wanted, Policy()
    )
    too_large = replace(update, extra={"share/0.weight": torch.full((2,), 1e7)})
    assert "numbers up to 1e+06, got 1e+07" in inspect(too_large, wanted, Policy())
    assert "no memory but what was asked for" in inspect(
        replace(update, memory={"x": torch.ones(1)}), wanted, Policy()
    )


class Spoiled:
    """A method of which one device misbehaves, or is not listened to."""

    def __init__(self, inner, bad=None):
        self.inner, self.bad, self.local = inner, bad, inner.local
        self.plan, self.subnet, self.sends = inner.plan, inner.subnet, inner.sends

    def train(self, net, task, steps):
        steps = list(steps)
        update = self.inner.train(net, task, steps)
        return self.bad(update) if self.bad and steps and task.place.device == 1 else update

    def merge(self, net, state, updates):
        if self.bad is None:
            updates = [update for update in updates if update.device != 1]
        return self.inner.merge(net, state, updates)


@pytest.mark.parametrize("bad", ["nothing", "NaN", "shape (1,)"])
@pytest.mark.parametrize("tag", ["fedavg", "distreal"])
def test_a_simulated_run_goes_on_without_the_device_and_says_why(tag, bad, tmp_path):
    setting = msgspec.structs.replace(SETTING, rounds=2, rules=Rules(late="wait"))
    *_, last = run(Spoiled(small(METHODS[tag]), BAD[bad]), setting, tmp_path)
    *_, wanted = run(Spoiled(small(METHODS[tag])), setting)
    assert last.digest == wanted.digest
    records = list(read(tmp_path / "events.jsonl", ledger.Record))
    assert ledger.check(records) == 2
    tasks = [record for record in records if isinstance(record, ledger.TaskRecord)]
    refused = [task for task in tasks if task.device == 1]
    assert len(refused) == 2
    for task in refused:
        assert task.end.startswith("rejected: device 1: expected ")
        assert (task.steps, task.samples, task.useful, task.loss) == (0, 0, 0.0, None)
        assert task.macs > 0  # it spent them all the same
    assert last.merged == DEVICES - 1


def test_a_setting_says_how_strict_the_guard_is():
    strict = msgspec.structs.replace(SETTING, guard=Policy(norm=1e-9))
    [record] = run(small(FedAvg), strict)
    assert record.merged == 0
    [record] = run(small(FedAvg))
    assert record.merged == DEVICES
