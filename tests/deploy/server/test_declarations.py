"""Devices that bring their own data: the server knows what they declare, and no more."""

import msgspec
import numpy as np
import pytest
from tests.deploy.bad_replies import set_fields
from tests.deploy.in_process import (
    InProcessTransport,
    compute_simulated_digest,
    make_context,
    make_own_devices,
    make_own_experiment,
    serve_rounds,
    write_own_data,
)

from pliant.data.declared import DataDeclaration
from pliant.deploy.messages import TrainReply, decode_message
from pliant.deploy.server.rounds import NotEnoughDevices
from pliant.engine.ledger import RoundRecord, TaskRecord, verify_records
from pliant.engine.run_store import load_run_state, load_trained_params
from pliant.nn.models import digits_cnn

MASKED = {"type": "heterofl", "masked": True, "local": {"batch": 16}}


@pytest.fixture
def folder(tmp_path):
    write_own_data(make_own_experiment(), tmp_path)
    return tmp_path


def declare(*fields):
    """Return a function that declares other data in a hello."""
    return set_fields(declaration=DataDeclaration(*fields))


def serve_own(experiment, folder, tamper=lambda device, raw: raw, **limits):
    """Serve rounds to devices whose hellos may be tampered with; return records and transport."""
    devices = make_own_devices(experiment, folder, **limits)
    transport = InProcessTransport(devices, experiment=experiment)
    transport.hello_replies = {d: tamper(d, raw) for d, raw in transport.hello_replies.items()}
    return serve_rounds(experiment, transport, folder / "run", patience=0.01), transport


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fednova", "distreal", MASKED])
def test_own_data_train_the_network_of_the_simulation(folder, method, monkeypatch):
    experiment = make_own_experiment(method)
    expected = compute_simulated_digest(experiment)

    def forbid(*_):
        raise AssertionError("expected nobody to load the training data of the experiment")

    monkeypatch.setattr("pliant.experiment.build.load_dataset", forbid)
    records, _ = serve_own(experiment, folder)
    assert verify_records(records) == 2
    assert records[-1].digest == expected


def test_hidden_classes_change_nothing_for_a_method_that_does_not_need_them(folder):
    experiment = make_own_experiment()
    records, transport = serve_own(experiment, folder, hide_classes=True)
    for raw in transport.hello_replies.values():
        assert decode_message(raw, TrainReply)[0].declaration.classes is None
    assert records[-1].digest == compute_simulated_digest(experiment)


def test_a_method_that_needs_classes_refuses_hidden_ones(folder):
    experiment = make_own_experiment(MASKED)
    with pytest.raises(NotEnoughDevices, match="no --classes hidden, as HeteroFl needs the class"):
        serve_own(experiment, folder, hide_classes=True)

    def hide(device, raw):
        return declare(1000, 20)(raw)

    with pytest.raises(NotEnoughDevices, match="device 2: expected its classes, which HeteroFl n"):
        serve_own(experiment, folder, hide)


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (declare(0), "expected 1 to 1000 samples .*got 0"),
        (declare(-1), "expected 1 to 1000 samples"),
        (declare(1001), "expected 1 to 1000 samples"),
        (declare(67, -1), "expected 0 to 1000 tests"),
        (declare(67, 10**9), "expected 0 to 1000 tests"),
        (declare(67, 0, ()), "rising classes from 0 to 9"),
        (declare(67, 0, (3, 3)), "rising classes"),
        (declare(67, 0, (-1, 3)), "rising classes"),
        (declare(67, 0, (3, 10)), "rising classes"),
        (set_fields(declaration=None), "a declaration of its data, found none"),
        (lambda raw: raw[:100], "an intact message"),
    ],
)
def test_a_device_without_a_possible_declaration_is_left_out(folder, tamper, message):
    experiment = make_own_experiment(server={"max_samples": 1000})
    with pytest.raises(NotEnoughDevices, match=rf"device 1: .*{message}"):
        serve_own(experiment, folder, lambda device, raw: tamper(raw))


def test_a_round_goes_on_without_a_device_that_is_left_out(folder):
    def tamper(device, raw):
        return declare(10**9)(raw) if device == 1 else raw

    records, _ = serve_own(make_own_experiment(), folder, tamper)
    assert {task.device for task in records if isinstance(task, TaskRecord)} == {0, 2}


def test_declarations_hold_for_the_whole_run(folder):
    experiment = make_own_experiment(rounds=1)
    serve_own(experiment, folder)
    declared = load_run_state(folder / "run").declarations
    assert {d.max_samples for d in declared.values()} == {66, 67}
    assert set(declared) == {0, 1, 2}
    longer = msgspec.structs.replace(experiment, rounds=2)
    records, _ = serve_own(longer, folder, lambda device, raw: declare(10**6, 9)(raw))
    assert load_run_state(folder / "run").declarations == declared
    assert records[-1].digest == compute_simulated_digest(longer)


def test_the_number_of_samples_may_change_between_rounds(folder):
    experiment = make_own_experiment("fednova", rounds=3)
    path = folder / "1" / "train" / "digits.npz"
    arrays = dict(np.load(path))

    def change(device, round, raw):
        count = (10, 5)[min(round, 1)]
        images = arrays["images"].repeat(2, axis=0) if round == 1 else arrays["images"][:count]
        labels = arrays["labels"].repeat(2) if round == 1 else arrays["labels"][:count]
        if device == 1:
            np.savez(path, images=images, labels=labels)
        return raw

    devices = make_own_devices(experiment, folder)
    transport = InProcessTransport(devices, change, experiment)
    records = serve_rounds(experiment, transport, folder / "run")
    tasks = [task for task in records if isinstance(task, TaskRecord) and task.device == 1]
    # all; ten images in one mini-batch; of twice as many images no more than declared
    assert [task.samples for task in tasks] == [67, 10, 67]
    assert {task.outcome for task in tasks} == {"finished"}
    assert tasks[1].macs == pytest.approx(tasks[0].macs * 10 / 67)


@pytest.mark.parametrize(
    ("samples", "problem"),
    [
        (67, None),
        (68, "1 to 67 local samples, got 68"),
        (0, "1 to 67 local samples, got 0"),
        (66, "MACs above 0 and up to"),  # fewer samples, but the work on all
    ],
)
def test_a_reply_counts_no_more_samples_than_declared(folder, samples, problem):
    experiment = make_own_experiment("fednova", rounds=1)

    def claim(device, round, raw):
        if device != 1 or decode_message(raw, TrainReply)[0].kind != "update":
            return raw
        return set_fields(num_samples=samples, samples=min(samples, 66))(raw)

    devices = make_own_devices(experiment, folder)
    transport = InProcessTransport(devices, claim, experiment)
    records = serve_rounds(experiment, transport, folder / "run")
    [task] = [task for task in records if isinstance(task, TaskRecord) and task.device == 1]
    if problem is None:
        assert task.outcome == "finished"
    else:
        assert task.outcome.startswith(f"rejected: device 1: expected {problem}")


def test_devices_test_the_network_themselves(folder):
    experiment = make_own_experiment(evaluation={"every": 1, "statistics": {"type": "running"}})
    records, _ = serve_own(experiment, folder)
    rounds = [record for record in records if isinstance(record, RoundRecord)]
    for record in rounds:
        assert record.score is None
        scores = record.on_devices
        assert (scores.devices, scores.tests) == ((0, 1, 2), (20, 20, 20))
        assert record.accuracy == sum(scores.correct) / 60
    net = digits_cnn().eval()
    net.load_state_dict(load_trained_params(folder / "run"))
    test = make_context(experiment).data.test
    is_right = net(test.get_normalised(slice(60))).argmax(1) == test.labels[:60]
    assert rounds[-1].on_devices.correct == tuple(is_right.view(3, 20).sum(1).tolist())


@pytest.mark.parametrize("fields", [{"correct": 21}, {"correct": -1}, {"tests": 21}, {"round": 5}])
def test_an_impossible_score_is_left_out(folder, fields):
    experiment = make_own_experiment(
        rounds=1, evaluation={"every": 1, "statistics": {"type": "running"}}
    )

    def lie(device, round, raw):
        is_score = decode_message(raw, TrainReply)[0].kind == "score"
        return set_fields(**fields)(raw) if device == 1 and is_score else raw

    devices = make_own_devices(experiment, folder)
    transport = InProcessTransport(devices, lie, experiment)
    records = serve_rounds(experiment, transport, folder / "run")
    assert records[-1].on_devices.devices == (0, 2)


def test_the_server_evaluates_on_its_own_images(folder):
    holdout = folder / "0" / "test"
    experiment = make_own_experiment(
        rounds=1,
        server={"holdout": str(holdout), "proxy": str(holdout / "digits.npz")},
        evaluation={"every": 1},
        network={"name": "digits_cnn_bn"},
    )
    records, _ = serve_own(experiment, folder)
    # the hold-out images are those that device 0 tests on, with the same statistics
    assert records[-1].score.accuracy == records[-1].on_devices.correct[0] / 20
