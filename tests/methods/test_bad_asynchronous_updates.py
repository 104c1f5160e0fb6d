"""Every kind of bad update in asynchronous runs: refused, counted, and without any effect."""

from unittest.mock import patch

import pytest
from msgspec.structs import replace as replace_fields
from tests.engine.small_runs import LOCAL, SETTINGS, data, network
from tests.methods.bad_updates import BAD_UPDATES, FALSE_MACS

from pliant.devices import Fleet
from pliant.engine import async_loop
from pliant.engine.evaluation import Evaluation
from pliant.engine.ledger import RoundRecord, TaskRecord, verify_records
from pliant.engine.round_rules import RoundRules
from pliant.engine.run_store import read_records
from pliant.engine.simulate import simulate
from pliant.methods import AsoFed, FedAsync, FedAvg, FedBuff
from pliant.methods.base import LocalTraining
from pliant.methods.validation import accept_valid

LOCAL_PASS = LocalTraining(LOCAL.optimiser, batch=16)
METHODS = {
    "fedasync": FedAsync(local=LOCAL_PASS, concurrency=3),
    "fedbuff": FedBuff(FedAvg(LOCAL_PASS), buffer=2, concurrency=3),
    "asofed": AsoFed(local=LOCAL_PASS, concurrency=3),
}
BAD_DEVICE = 1


def claim_macs(make_macs):
    def spoil(update, manifest):
        macs = make_macs(sum(manifest.max_macs[: update.steps]))
        return type(update)(**vars(update) | {"macs": macs})

    return spoil


KINDS = [lambda update, manifest, spoil=spoil: spoil(update) for spoil in BAD_UPDATES.values()]
KINDS += [claim_macs(make_macs) for make_macs in FALSE_MACS.values()]


def run(method, folder, kinds):
    """Run until the bad device has sent all kinds of updates; return the records."""
    waiting = iter(kinds)

    def spoil(reply, manifest, policy):
        if manifest.device == BAD_DEVICE:
            reply = next(waiting)(reply, manifest)
        return accept_valid(reply, manifest, policy)

    rounds = 2 * len(kinds) // method.buffer - 2  # others do two tasks while it does one
    evaluation = Evaluation(every=10**6)
    settings = replace_fields(
        SETTINGS,
        rounds=rounds,
        rules=RoundRules(late="wait"),
        evaluation=evaluation,
        checkpoint_every=10**6,
    )
    with patch.object(async_loop, "accept_valid", spoil):
        list(simulate(method, network(), data(), Fleet(size=3), settings=settings, folder=folder))
    assert next(waiting, None) is None or len(list(waiting)) < 3  # nearly all were sent
    return list(read_records(folder))


@pytest.mark.parametrize(
    "name", ["fedbuff", *(pytest.param(n, marks=pytest.mark.slow) for n in ("asofed", "fedasync"))]
)
def test_bad_updates_end_their_tasks_and_have_no_effect(name, tmp_path):
    method = METHODS[name]
    records = run(method, tmp_path / "bad", KINDS)
    rounds = verify_records(records)
    merges = [record for record in records if isinstance(record, RoundRecord)]
    # neither the version nor the buffer counts them, and each has its reason
    assert {record.merged for record in merges} == {method.buffer}
    tasks = [t for t in records if isinstance(t, TaskRecord) and t.device == BAD_DEVICE]
    reasons = [task.outcome for task in tasks if task.outcome != "surplus"]
    assert all(r.startswith(f"rejected: device {BAD_DEVICE}: expected ") for r in reasons)
    assert sum(record.outcomes.get("rejected", 0) for record in merges) == len(reasons)
    assert len(reasons) >= len(KINDS) - 3  # the device gets new work each time
    assert len(set(reasons)) > 40
    assert {(task.steps, task.samples, task.useful) for task in tasks} == {(0, 0, 0.0)}
    silent = run(method, tmp_path / "silent", [lambda update, manifest: None] * len(KINDS))
    assert verify_records(silent) == rounds
    assert merges[-1].digest == silent[-1].digest
