import math
from dataclasses import dataclass, replace
from functools import cache
from typing import get_args
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch
from tests.methods.bad_updates import BAD_UPDATES, FALSE_MACS
from tests.methods.tiny_runs import make_context, make_state
from tests.methods.wrapped_method import WrappedMethod

from pliant.data import Iid, ImageDataset
from pliant.data.federated import TrainTestData
from pliant.devices import ChangingTrace, Fleet
from pliant.engine import ledger, round_training, simulate
from pliant.engine.local_work import Job, make_task
from pliant.engine.manifests import ManifestBuilder
from pliant.engine.round_rules import RoundRules
from pliant.engine.run_store import read_records
from pliant.methods import AnyMethod, FedAvg, FedDf
from pliant.methods.base import LocalTraining, TaskKey, Update
from pliant.methods.scaffold import ScaffoldDeviceState
from pliant.methods.state import flatten_state
from pliant.methods.validation import (
    UpdateManifest,
    ValidationPolicy,
    accept_valid,
    check_values,
    find_problem,
    make_specs,
)
from pliant.methods.verbs import RunsAsynchronously, SharesPredictions, TrainsPart
from pliant.nn.elastic import elastic
from pliant.nn.models import digits_cnn_bn, exit_cnn
from pliant.params import digest, get_params, is_finite
from pliant.value import decode

METHODS = {
    kind.__struct_config__.tag: kind
    for kind in get_args(AnyMethod)
    # without rounds, but with the same manifests; and those without deltas
    if not isinstance(kind(), RunsAsynchronously | SharesPredictions)
}
DEVICES = 4
SETTINGS = simulate.RunSettings(rounds=1, per_round=DEVICES, rules=RoundRules(late="partial"))


def make_network(method=None):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if isinstance(method, TrainsPart):
            return exit_cnn(5, filters=(4, 6), channels=1)
        return digits_cnn_bn(5, filters=(4, 6), hidden=8, side=16)


@cache
def make_data():
    rng = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (140, 1, 16, 16), generator=rng, dtype=torch.uint8)
    images = ImageDataset.from_tensors(pixels, torch.arange(140) % 5, classes=5)
    return TrainTestData(images, images).share(Iid(), DEVICES, proxy=20)


def make_method(cls):
    """Make a method with default settings, except for small batches."""
    method = cls()
    if cls is FedDf:
        return FedDf(make_method(type(method.inner)), steps=2)
    return msgspec.structs.replace(
        method, local=msgspec.structs.replace(method.local, batch=8, epochs=1)
    )


def make_elastic(method=None):
    return elastic(make_network(method), make_data().train.get_normalised(slice(0, 1)))


def run(method, settings=SETTINGS, folder=None):
    fleet = Fleet(size=DEVICES, speed=ChangingTrace(low=0.5, high=1.0, per_round=2.0))
    return list(
        simulate.simulate(
            method, make_network(method), make_data(), fleet, settings=settings, folder=folder
        )
    )


@dataclass(frozen=True, eq=False)
class Round:
    """The updates and manifests of a real round before validation."""

    method: object
    net: object
    updates: dict
    manifests: dict

    def merge(self, updates):
        state = self.method.merge(self.net, make_state(self.net, self.method), updates)
        assert is_finite(state.params)
        return digest(flatten_state(state)), state.params

    @cache  # noqa: B019  # one per method
    def merge_without(self, device):
        return self.merge([u for d, u in sorted(self.updates.items()) if d != device])

    def validate(self, updates):
        policy = ValidationPolicy()
        results = {d: accept_valid(updates[d], self.manifests[d], policy) for d in updates}
        accepted = [update for update, _ in results.values() if update is not None]
        return accepted, {d: reason for d, (_, reason) in results.items() if reason is not None}


@cache
def run_round(tag):
    """Run one round of a method and record its updates and manifests."""
    updates, all_manifests = {}, {}

    def record_call(reply, manifest, policy):
        updates[manifest.device], all_manifests[manifest.device] = reply, manifest
        return accept_valid(reply, manifest, policy)

    method = make_method(METHODS[tag])
    with patch.object(round_training, "accept_valid", record_call):
        run(method)
    return Round(method, make_elastic(method), updates, all_manifests)


def test_there_are_forty_kinds_of_bad_updates():
    assert len(BAD_UPDATES) >= 40


@pytest.mark.parametrize("tag", METHODS)
def test_honest_updates_are_accepted_unchanged(tag):
    round = run_round(tag)
    updates, rejected = round.validate(round.updates)
    assert rejected == {}
    assert [update.device for update in updates] == list(range(DEVICES))
    assert all(update is round.updates[update.device] for update in updates)
    assert round.merge(updates)[0] != round.merge_without(1)[0]  # a missing device would show


def check_rejected(round, spoiled, name):
    """Check that an update is rejected with a reason and has no effect; return the reason."""
    updates, rejected = round.validate({**round.updates, 1: spoiled})
    assert list(rejected) == [1], name
    assert rejected[1].startswith("device 1: expected "), name
    assert ", got " in rejected[1], name
    assert "\n" not in rejected[1], name
    assert len(rejected[1]) < 300, name
    # what is left are the other devices' own updates, and so is what is merged
    assert [update.device for update in updates] == [0, 2, 3], name
    assert all(update is round.updates[update.device] for update in updates), name
    return rejected[1]


@pytest.mark.parametrize("tag", METHODS)
def test_bad_updates_are_rejected_with_a_reason_and_have_no_effect(tag):
    round = run_round(tag)
    expected, _ = round.merge_without(1)
    for name, spoil in BAD_UPDATES.items():
        check_rejected(round, spoil(round.updates[1]), name)
    for name, make_macs in FALSE_MACS.items():
        macs = make_macs(sum(round.manifests[1].max_macs))
        reason = check_rejected(round, replace(round.updates[1], macs=macs), name)
        assert reason.startswith("device 1: expected MACs above 0 and up to "), name
    remaining, _ = round.validate({**round.updates, 1: None})
    assert round.merge(remaining)[0] == expected


@pytest.mark.parametrize("tag", METHODS)
def test_a_device_may_claim_the_largest_possible_macs(tag):
    round = run_round(tag)
    update = replace(round.updates[1], macs=sum(round.manifests[1].max_macs))
    assert find_problem(update, round.manifests[1], ValidationPolicy()) is None


@pytest.mark.parametrize("tag", METHODS)
def test_a_round_of_bad_updates_only_leaves_the_network_as_it_is(tag):
    round = run_round(tag)
    updates, rejected = round.validate(dict.fromkeys(round.updates))
    assert (updates, sorted(rejected)) == ([], list(range(DEVICES)))
    _, params = round.merge(updates)
    assert digest(params) == digest(get_params(make_network(round.method)))


MANIFEST = UpdateManifest(3, (8, 8, 4), (80.0, 80.0, 40.0), make_specs({"weight": torch.zeros(2)}))
GOOD = Update(3, {"weight": torch.tensor([3.0, 4.0])}, 16, 2, 160.0, 0.5)


def check(update=GOOD, manifest=MANIFEST, **fields):
    """Return the problem of an update with some fields replaced."""
    return find_problem(replace(update, **fields), manifest, ValidationPolicy())


def test_reasons_name_the_expected_and_the_received_value():
    assert check() is None
    assert check(loss=None) is None
    assert check(steps=4) == "device 3: expected 1 to 3 steps, got 4"
    assert check(samples=17) == "device 3: expected 1 to 16 samples in 2 steps, got 17"
    assert check(macs=160.5) == (
        "device 3: expected MACs above 0 and up to 160.0 for 2 mini-batches, got 160.5"
    )
    assert check(delta={"weight": torch.tensor([math.nan, 1.0])}) == (
        "device 3: expected delta 'weight' of finite numbers, got 1 that are not"
    )
    assert check(delta={"weight": torch.zeros(2), "x" * 999: 1}).endswith("x…'")


def test_a_device_that_did_more_may_claim_more():
    longer = replace(GOOD, steps=3, samples=20, macs=200.0)
    assert check(longer) is None
    assert check(longer, steps=2) is not None


def test_a_delta_of_large_norm_is_rejected_or_clipped():
    assert find_problem(GOOD, MANIFEST, ValidationPolicy(norm=5.0)) is None
    assert find_problem(GOOD, MANIFEST, ValidationPolicy(norm=1.0)) == (
        "device 3: expected a delta of norm up to 1, got 5"
    )
    clipping = ValidationPolicy(norm=1.0, clip=True)
    clipped, reason = accept_valid(GOOD, MANIFEST, clipping)
    assert reason is None
    assert torch.allclose(clipped.delta["weight"], torch.tensor([0.6, 0.8]))
    assert torch.equal(GOOD.delta["weight"], torch.tensor([3.0, 4.0]))
    short, _ = accept_valid(GOOD, MANIFEST, ValidationPolicy(norm=9.0, clip=True))
    assert short is GOOD


def test_policies_are_decoded_and_checked():
    policy = decode({"norm": 5, "clip": True}, ValidationPolicy)
    assert policy == ValidationPolicy(norm=5.0, clip=True)
    with pytest.raises(ValueError, match=r"Expected a norm to clip, got None - at `\$.norm` of "):
        ValidationPolicy(clip=True)
    with pytest.raises(ValueError, match=r"Expected `float` > 0.0"):
        ValidationPolicy(norm=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64])
def test_every_number_up_to_the_largest_is_accepted(dtype):
    def find(*numbers):
        return list(check_values("delta", {"w": torch.tensor(numbers).to(dtype)}, 100.0))

    assert find(100.0, -100.0, 100.0) == []  # their norm is above it
    assert find(0.0, 101.0) == ["delta 'w' of numbers up to 100, got 101"]
    assert find(-101.0) == ["delta 'w' of numbers up to 100, got 101"]


def test_numbers_whose_squares_overflow_are_finite():
    params = {"w": torch.full((3,), 1e30), "v": torch.ones(2)}
    assert list(check_values("device_state", params, math.inf)) == []
    params["v"][1] = math.nan
    [problem] = check_values("device_state", params, math.inf)
    assert problem == "device_state 'v' of finite numbers, got 1 that are not"


class RaisesAlways:
    """An object whose every operation fails."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __len__ = __bool__ = __abs__ = __getattr__
    __hash__ = object.__hash__


JUNK = [np.zeros(3), torch.zeros(3), {}, [], b"", "", -1.5, 10**400]
JUNK += [RaisesAlways(), {"weight": RaisesAlways()}]


@pytest.mark.parametrize("field", ["device", "delta", "samples", "steps", "macs", "loss"])
def test_no_object_makes_validation_raise(field):
    for junk in JUNK:
        if field == "loss" and type(junk) in (int, float):
            continue  # any finite number may be a loss
        assert "expected" in check(**{field: junk})


class PackedMethod:
    """A method that sends half of the filters and returns one extra number for each of them."""

    local = LocalTraining(batch=8)

    def subnet_to_send(self, net, row, key):
        return net.select_prefix(0.5, net.make_rolling_orders(key.device))

    def train(self, net, task, steps):
        delta = {name: torch.ones_like(tensor) for name, tensor in task.params.items()}
        extra = {"share/0.weight": torch.ones(2)}
        subnet_steps = ((task.subnet, 1),)
        return Update(
            task.key.device, delta, 8, 1, 1.0, 0.0, task.subnet, extra, subnet_steps=subnet_steps
        )


@pytest.fixture(scope="module")
def packed():
    context = make_context(make_elastic(), PackedMethod())
    job = Job(TaskKey(0, 0, 1), (0,), (1.0,), 0.1, {})
    params = get_params(context.net.module)
    manifest = ManifestBuilder(context).build(params, job, (8,), (9.0,))
    return context.net, manifest, context.train(make_task(context, params, job), ())


def test_a_packed_update_must_have_the_shapes_of_its_subnet(packed):
    net, manifest, update = packed
    assert check(update, manifest) is None
    assert manifest.delta["features.0.weight"].shape == (2, 1, 5, 5)
    problem = check(update, manifest, delta=get_params(net.module))
    assert "of shape (2, 1, 5, 5), got (4, 1, 5, 5)" in problem


def test_a_packed_update_must_belong_to_the_filters_that_were_sent(packed):
    net, manifest, update = packed
    copy = PackedMethod().subnet_to_send(net, 0, TaskKey(0, 0, 1))
    assert check(update, manifest, subnet=copy) is None
    others = [net.select_prefix(0.5), net.full, None, replace(update.subnet, masks=None), "all"]
    others += [replace(update.subnet, network="x"), replace(update.subnet, scales=(9.0,) * 2)]
    for other in others:
        assert "the subnet it was sent" in check(update, manifest, subnet=other)


def test_trained_subnets_must_be_possible_and_account_for_all_steps(packed):
    net, manifest, update = packed
    half = net.select_prefix(0.5)
    empty = replace(half, masks=tuple(mask & False for mask in half.masks))
    longer = replace(half, masks=tuple(np.ones(len(mask) + 1, np.bool_) for mask in half.masks))
    scales = replace(half, scales=(math.nan, 1.0))
    assert check(update, manifest, subnet_steps=((half, 1),)) is None
    for bad in (empty, longer, scales, replace(half, network="x"), replace(half, masks=7), "half"):
        problem = check(update, manifest, subnet_steps=((bad, 1),))
        assert "trained subnets of this network, got another" in problem
    for bad in ((), ((half, 2),), ((half, 1), (half, 1))):
        problem = check(update, manifest, subnet_steps=bad)
        assert "trained subnets for 1 steps, got" in problem
    for bad in (None, [(half, 1)], ((half, True),), ((half, 0), (half, 1)), (half,)):
        assert "subnet_steps as" in check(update, manifest, subnet_steps=bad)


def test_extra_tensors_are_checked_too(packed):
    _, manifest, update = packed
    assert "extra 'share/0.weight', got none" in check(update, manifest, extra={})
    too_large = {"share/0.weight": torch.full((2,), 1e7)}
    assert "numbers up to 1e+06, got 1e+07" in check(update, manifest, extra=too_large)


def test_the_device_state_is_checked_by_type_and_by_tensor(packed):
    _, manifest, update = packed
    problem = check(update, manifest, device_state={"x": torch.ones(1)})
    assert "device_state of type 'NoneType', got an object of type 'dict'" in problem
    manifest = replace(manifest, device_state=ScaffoldDeviceState({"x": torch.ones(1)}))
    for state, expected in [
        (None, "device_state of type 'ScaffoldDeviceState', got nothing"),
        (ScaffoldDeviceState({}), "device_state 'x', got none"),
        (ScaffoldDeviceState({"x": torch.ones(2)}), "device_state 'x' of shape (1,), got (2,)"),
        (ScaffoldDeviceState({"x": torch.tensor([math.nan])}), "'x' of finite numbers, got 1"),
        (ScaffoldDeviceState(7), "a readable update, got"),
    ]:
        assert expected in check(update, manifest, device_state=state)
    good = ScaffoldDeviceState({"x": torch.zeros(1)})
    assert check(update, manifest, device_state=good) is None


class SpoiledMethod(WrappedMethod):
    """A method whose device 1 sends bad updates or, without `spoil`, is ignored."""

    def __init__(self, inner, spoil=None):
        super().__init__(inner)
        self.spoil = spoil

    def train(self, net, task, steps):
        steps = list(steps)
        update = super().train(net, task, steps)
        return self.spoil(update) if self.spoil and steps and task.key.device == 1 else update

    def merge(self, net, state, updates):
        if self.spoil is None:
            updates = [update for update in updates if update.device != 1]
        return super().merge(net, state, updates)


@pytest.mark.parametrize("bad", ["nothing", "NaN", "shape (1,)"])
@pytest.mark.parametrize("tag", ["fedavg", "distreal"])
def test_a_simulated_run_continues_without_the_device_and_records_why(tag, bad, tmp_path):
    settings = msgspec.structs.replace(SETTINGS, rounds=2, rules=RoundRules(late="wait"))
    method = make_method(METHODS[tag])
    *_, last = run(SpoiledMethod(method, BAD_UPDATES[bad]), settings, tmp_path)
    *_, expected = run(SpoiledMethod(method), settings)
    assert last.digest == expected.digest
    records = list(read_records(tmp_path))
    assert ledger.verify_records(records) == 2
    tasks = [record for record in records if isinstance(record, ledger.TaskRecord)]
    rejected = [task for task in tasks if task.device == 1]
    assert len(rejected) == 2
    for task in rejected:
        assert task.outcome.startswith("rejected: device 1: expected ")
        assert (task.steps, task.samples, task.useful, task.loss) == (0, 0, 0.0, None)
        assert task.macs > 0  # it spent them all the same
    assert last.merged == DEVICES - 1


def test_run_settings_include_the_validation_policy():
    strict = msgspec.structs.replace(SETTINGS, guard=ValidationPolicy(norm=1e-9))
    [record] = run(make_method(FedAvg), strict)
    assert record.merged == 0
    [record] = run(make_method(FedAvg))
    assert record.merged == DEVICES
