from itertools import islice

import msgspec
import numpy as np
import pytest
import torch
from tests.engine.raw_records import check_totals
from tests.split.small_split import ADASPLIT, LOCAL, make_data, make_network, make_settings, run

from pliant.data import CropFlip
from pliant.devices import ConstantTrace, DeviceClass, Fleet, SteppedTrace
from pliant.engine.evaluation import Evaluation
from pliant.engine.ledger import TaskRecord, verify_records
from pliant.engine.round_loop import RunSettings
from pliant.engine.round_rules import RoundRules
from pliant.engine.run_store import read_records
from pliant.engine.selection import Fastest, select_devices
from pliant.engine.split_loop import check_split_rules, simulate_split
from pliant.engine.split_virtual import VirtualEnvironment
from pliant.split import AdaSplit, SplitFed, VanillaSplit


def make_environment(fleet, clients=2, **options):
    return VirtualEnvironment(fleet, np.full(clients, 10.0), RunSettings(), 0, 0.0, **options)


UNUSED = {"speeds": None, "history": {}}  # by a uniform selection
LINKED = DeviceClass(up=10.0, down=20.0, latency=0.5)


def test_the_times_of_an_exchange_by_hand():
    environment = make_environment(
        Fleet(size=2, macs_per_second=4.0, classes=(LINKED,)), server_speed=2.0
    )
    environment.available_clients()
    assert environment.compute(0, 8.0, samples=1)  # 2 s
    environment.upload(0, 30)  # 3 s and 0.5 s of latency: 5.5
    environment.serve([0], 6.0)  # 3 s: 8.5
    environment.download(0, 40)  # 2.5 s: 11
    assert environment.now[0] == 11.0
    assert environment.costs[0].waited == 9.0
    assert environment.seconds_elapsed() == 11.0
    environment.barrier()
    assert environment.now.tolist() == [11.5, 11.5]  # 0.5 s for the message to continue


def test_a_device_computes_while_it_sends_and_the_server_handles_one_message_at_a_time():
    environment = make_environment(
        Fleet(size=2, macs_per_second=4.0, classes=(LINKED,)), server_speed=2.0
    )
    environment.available_clients()
    for client in (0, 1):
        environment.compute(client, 4.0, samples=1)  # 1 s
        environment.upload(client, 10)  # 1 s and 0.5 s of latency: arrives at 2.5
        environment.serve([client], 2.0)  # 1 s each
        environment.compute(client, 4.0, samples=0)
    assert environment.now.tolist() == [2.0, 2.0]
    assert environment.server_done.tolist() == [3.5, 4.5]
    assert environment.seconds_elapsed() == 4.5


@pytest.mark.parametrize("method", [ADASPLIT, VanillaSplit(local=LOCAL), SplitFed(local=LOCAL)])
def test_the_records_of_a_run_agree(method, tmp_path):
    fleet = Fleet(size=3, speed=ConstantTrace(low=0.3, high=1.0), classes=(LINKED,))
    run(method, fleet=fleet, folder=tmp_path, server_speed=1e9)
    assert verify_records(read_records(tmp_path)) == check_totals(tmp_path) == 4


def test_in_vanilla_split_learning_one_client_works_at_a_time():
    sequential, parallel = run(VanillaSplit(local=LOCAL)), run(SplitFed(local=LOCAL))
    assert sequential[0].seconds > 2 * parallel[0].seconds
    assert sequential[0].exchange.waited > 0


@pytest.mark.parametrize(
    "method", [ADASPLIT, VanillaSplit(local=LOCAL), SplitFed(local=LOCAL, version=2)]
)
@pytest.mark.parametrize("rounds", [1, 3])
def test_an_interrupted_run_gives_the_same_bits(method, rounds, tmp_path):
    uninterrupted = run(method, folder=tmp_path / "uninterrupted")
    interrupted = simulate_split(
        method,
        make_network(),
        make_data(),
        Fleet(size=3),
        settings=make_settings(),
        folder=tmp_path / "resumed",
    )
    list(islice(interrupted, rounds))
    interrupted.close()
    last = run(method, folder=tmp_path / "resumed")[-1]
    assert last.digest == uninterrupted[-1].digest
    files = [
        (tmp_path / name / "events.jsonl").read_bytes() for name in ("uninterrupted", "resumed")
    ]
    assert files[0] == files[1]


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    run(folder=tmp_path)
    assert run(folder=tmp_path) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"settings": make_settings(rounds=6)}, "rounds = 4, not 6: split learning keeps no opt"),
        ({"method": SplitFed(local=LOCAL)}, 'method.type = "adasplit", not "splitfed"'),
        ({"server_speed": 1e9}, "server_speed = null, not 1000000000.0"),
    ],
)
def test_a_run_with_other_inputs_is_not_resumed(options, message, tmp_path):
    run(folder=tmp_path)
    before = (tmp_path / "events.jsonl").read_bytes()
    with pytest.raises(ValueError, match=message):
        run(**options, folder=tmp_path)
    assert (tmp_path / "events.jsonl").read_bytes() == before


def test_a_run_continues_without_clients_that_leave(tmp_path):
    settings = msgspec.structs.replace(
        make_settings(rounds=6), rules=RoundRules(late="wait", dropout=0.5)
    )
    records = run(settings=settings, folder=tmp_path)
    outcomes = {r.outcome for r in read_records(tmp_path) if isinstance(r, TaskRecord)}
    assert {"partial", "finished"} <= outcomes
    assert len(records) == 6
    assert verify_records(read_records(tmp_path)) == 6


def test_a_client_that_joins_in_the_global_phase_gets_a_mask_and_is_selected(tmp_path):
    # the third client belongs to a class that is available from 2.2 s; a round takes one second
    late = DeviceClass(name="late", speed=SteppedTrace(times=(0.0, 2.2), speeds=(0.0, 1.0)))
    seed = next(
        seed
        for seed in range(500)
        if Fleet(size=3, classes=(DeviceClass(share=2.0), late))
        .get_class_indices(np.arange(3), seed=seed)
        .tolist()
        == [0, 0, 1]
    )
    settings = msgspec.structs.replace(make_settings(rounds=6), seed=seed)
    fleet = Fleet(size=3, classes=(DeviceClass(share=2.0), late))
    records = run(fleet=fleet, settings=settings, folder=tmp_path)
    assert [record.tasks for record in records[:2]] == [2, 2]
    assert records[-1].tasks == 3
    tasks = [record for record in read_records(tmp_path) if isinstance(record, TaskRecord)]
    assert [task for task in tasks if task.device == 2][-1].exchange.uplinks > 0


@pytest.mark.parametrize("method", [ADASPLIT, VanillaSplit(local=LOCAL), SplitFed(local=LOCAL)])
def test_a_round_trains_the_clients_that_a_federated_run_would_select(method, tmp_path):
    settings = msgspec.structs.replace(make_settings(rounds=6), per_round=2)
    run(method, settings=settings, folder=tmp_path)
    assert verify_records(read_records(tmp_path)) == check_totals(tmp_path) == 6
    tasks = [record for record in read_records(tmp_path) if isinstance(record, TaskRecord)]
    trained = [{t.device for t in tasks if t.round == number and t.steps} for number in range(6)]
    selected = [
        set(select_devices(3, 2, "uniform", seed=0, round=number, **UNUSED).tolist())
        for number in range(6)
    ]
    assert trained == selected
    assert len({frozenset(clients) for clients in trained}) > 1
    # a client that was not selected costs nothing, unless it has to pass the common part on
    others = [task for task in tasks if not task.steps]
    assert all(task.macs == 0 and task.up > 0 == task.down for task in others)
    assert bool(others) == isinstance(method, VanillaSplit)
    assert {task.outcome for task in others} <= {"surplus"}


def test_eta_is_a_share_of_the_selected_clients():
    method = AdaSplit(local=LOCAL, kappa=0.0, eta=0.5)
    settings = msgspec.structs.replace(make_settings(rounds=1), per_round=2)
    [record] = run(method, settings=settings)
    assert record.tasks == 2
    assert record.exchange.uplinks == 3  # one of two clients in each of three mini-batches


def test_clients_that_are_unavailable_when_a_round_starts_may_be_left_out():
    late = DeviceClass(speed=SteppedTrace(times=(0.0, 0.2), speeds=(0.0, 1.0)), share=1.0)
    fleet = Fleet(size=3, classes=(DeviceClass(share=2.0), late))
    seed = next(
        seed
        for seed in range(500)
        if fleet.get_class_indices(np.arange(3), seed=seed).tolist() == [0, 0, 1]
    )
    settings = msgspec.structs.replace(make_settings(rounds=2), seed=seed)
    method = AdaSplit(local=LOCAL, kappa=0.0)  # in the global phase, all go on together
    assert [record.tasks for record in run(method, fleet=fleet, settings=settings)] == [3, 3]
    settings = msgspec.structs.replace(settings, select="available")
    assert [record.tasks for record in run(method, fleet=fleet, settings=settings)] == [2, 3]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"late": "discard"}, "rules.late = \"wait\" for a split method, .*got 'discard'"),
        ({"late": "partial"}, "rules.late = \"wait\" for a split method, .*got 'partial'"),
        ({"quorum": 0.5}, "rules.quorum = 0: .*got 0.5"),
        ({"over_selection": 0.5}, "rules.over_selection = 0 for a split method, .*got 0.5"),
    ],
)
def test_rules_that_split_rounds_do_not_follow_are_refused(rules, message, tmp_path):
    rules = RoundRules(**{"late": "wait"} | rules)
    settings = msgspec.structs.replace(make_settings(), rules=rules, per_round=2)
    with pytest.raises(ValueError, match=message):
        run(settings=settings, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_selection_by_what_devices_did_before_is_refused():
    settings = msgspec.structs.replace(make_settings(), select=Fastest())
    with pytest.raises(ValueError, match=r'"uniform" or "available" for a split .*got Fastest'):
        run(settings=settings)


def test_rules_that_change_nothing_are_accepted():
    rules = RoundRules(late="wait", over_selection=0.5, grace=0.1, close_early=True)
    settings = msgspec.structs.replace(make_settings(rounds=1), rules=rules, per_round=3)
    assert run(settings=settings) == run(rounds=1)


def test_clients_train_on_augmented_images(tmp_path):
    replace = msgspec.structs.replace
    augmented = replace(ADASPLIT, local=replace(LOCAL, augment=CropFlip(pad=2)))
    records = run(augmented)
    assert records[-1].digest != run(ADASPLIT)[-1].digest
    run(augmented, folder=tmp_path, stop=2)
    assert run(augmented, folder=tmp_path) == records[2:]


def test_a_fleet_with_fewer_devices_than_clients_is_refused():
    with pytest.raises(ValueError, match="fleet of at least 3 clients, got 2"):
        run(fleet=Fleet(size=2))


def test_a_dry_run_costs_what_a_real_one_does_apart_from_zeros():
    even = make_data((16, 16, 16))
    real, dry = run(data=even), run(data=even, is_dry=True)
    for real_round, dry_round in zip(real, dry, strict=True):
        assert real_round.macs == dry_round.macs
        assert real_round.exchange.dense == dry_round.exchange.dense
        assert real_round.exchange.nonzero <= dry_round.exchange.nonzero
    assert dry[-1].personal is None


def test_the_given_network_is_not_changed():
    net = make_network()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    list(simulate_split(ADASPLIT, net, make_data(), Fleet(size=3), settings=make_settings(2)))
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


def test_torch_has_one_thread_while_training_and_as_many_as_before_afterwards():
    torch.set_num_threads(2)
    try:
        rounds = simulate_split(
            ADASPLIT, make_network(), make_data(), Fleet(size=3), settings=make_settings()
        )
        next(rounds)
        assert torch.get_num_threads() == 1
        rounds.close()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    "change", [{"seconds": 5.0}, {"evaluation": Evaluation(every_seconds=1.0)}]
)
def test_split_runs_count_rounds_not_seconds(change):
    with pytest.raises(ValueError, match="which counts rounds"):
        check_split_rules(msgspec.structs.replace(make_settings(), **change), Fleet(size=2), 2)
