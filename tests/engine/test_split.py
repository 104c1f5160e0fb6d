import sys
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from pliant.devices import Constant, DeviceClass, Fleet, Steps
from pliant.engine.ledger import TaskRecord, check
from pliant.engine.rules import Rules
from pliant.engine.split import simulate_split
from pliant.engine.split_floor import Hall
from pliant.engine.store import events
from pliant.split import Split, SplitFed
from pliant.split.base import Work

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))
from little import ADASPLIT, LOCAL, data, network, run, setting


def hall(fleet, clients=2, **options):
    given = {
        "seed": 0,
        "start": 0.0,
        "leaves": np.full(clients, np.inf),
        "server_speed": None,
        "classes": 3,
        "owned": [frozenset({0, 1, 2})] * clients,
        "largest": 1e6,
        "wire": lambda client, message: message,
    }
    return Hall(fleet, np.full(clients, 10.0), **(given | options))


LINKED = DeviceClass(up=10.0, down=20.0, latency=0.5)


def test_an_exchange_on_the_clock_by_hand():
    floor = hall(Fleet(size=2, macs_per_second=4.0, classes=(LINKED,)), server_speed=2.0)
    floor.present()
    assert floor.compute(0, Work(8.0, 8.0, 1))  # 2 s
    floor._upload(0, 30)  # 3 s and half a second on the way: 5.5
    floor.serve(0, Work(6.0, 2.0, 1))  # 3 s: 8.5
    floor.give_back(0, 40, dense=40, nonzero=40)  # 2.5 s: 11
    assert floor.now[0] == 11.0
    assert floor.accounts[0].waited == 9.0
    assert floor.close() == 11.0
    floor.gather()
    assert floor.now.tolist() == [11.5, 11.5]  # each is told who is next


def test_a_device_computes_while_it_sends_and_the_server_takes_one_after_another():
    floor = hall(Fleet(size=2, macs_per_second=4.0, classes=(LINKED,)), server_speed=2.0)
    floor.present()
    for client in (0, 1):
        floor.compute(client, Work(4.0, 4.0, 1))  # 1 s
        floor._upload(client, 10)  # 1 s and a half on the way: there at 2.5
        floor.serve(client, Work(2.0, 2.0, 1))  # 1 s each
        floor.compute(client, Work(4.0, 0.0, 0))
    assert floor.now.tolist() == [2.0, 2.0]
    assert floor.ready.tolist() == [3.5, 4.5]
    assert floor.close() == 4.5


@pytest.mark.parametrize("method", [ADASPLIT, Split(local=LOCAL), SplitFed(local=LOCAL)])
def test_the_ledger_of_a_run_agrees(method, tmp_path):
    fleet = Fleet(size=3, speed=Constant(low=0.3, high=1.0), classes=(LINKED,))
    run(method, fleet=fleet, folder=tmp_path, server_speed=1e9)
    assert check(events(tmp_path)) == 4


def test_split_learning_lets_one_client_work_at_a_time():
    alone, together = run(Split(local=LOCAL)), run(SplitFed(local=LOCAL))
    assert alone[0].seconds > 2 * together[0].seconds
    assert alone[0].exchange.waited > 0


@pytest.mark.parametrize("method", [ADASPLIT, Split(local=LOCAL), SplitFed(local=LOCAL, version=2)])
@pytest.mark.parametrize("rounds", [1, 3])
def test_a_run_broken_off_anywhere_comes_to_the_same_bits(method, rounds, tmp_path):
    calm = run(method, folder=tmp_path / "calm")
    broken = simulate_split(
        method, network(), data(), Fleet(size=3), setting=setting(), folder=tmp_path / "torn"
    )
    list(islice(broken, rounds))
    broken.close()
    last = run(method, folder=tmp_path / "torn")[-1]
    assert last.digest == calm[-1].digest
    files = [(tmp_path / name / "events.jsonl").read_bytes() for name in ("calm", "torn")]
    assert files[0] == files[1]


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    run(folder=tmp_path)
    assert run(folder=tmp_path) == []


def test_clients_that_leave_in_the_middle_are_missed_and_the_run_goes_on(tmp_path):
    how = msgspec.structs.replace(setting(rounds=6), rules=Rules(dropout=0.5))
    records = run(setting=how, folder=tmp_path)
    ends = {line.end for line in events(tmp_path) if isinstance(line, TaskRecord)}
    assert {"partial", "finished"} <= ends | {"dropped"}
    assert "partial" in ends or "dropped" in ends
    assert len(records) == 6
    assert check(events(tmp_path)) == 6


def test_a_client_that_comes_in_the_global_phase_gets_a_mask_and_is_chosen(tmp_path):
    # the third client belongs to a class that wakes at 2.2 s; a round takes one second
    late = DeviceClass(name="late", speed=Steps(times=(0.0, 2.2), speeds=(0.0, 1.0)))
    seed = next(
        seed
        for seed in range(500)
        if Fleet(size=3, classes=(DeviceClass(share=2.0), late))
        .class_of(np.arange(3), seed=seed)
        .tolist()
        == [0, 0, 1]
    )
    how = msgspec.structs.replace(setting(rounds=6), seed=seed)
    fleet = Fleet(size=3, classes=(DeviceClass(share=2.0), late))
    records = run(fleet=fleet, setting=how, folder=tmp_path)
    assert [record.tasks for record in records[:2]] == [2, 2]
    assert records[-1].tasks == 3
    third = [line for line in events(tmp_path) if isinstance(line, TaskRecord) and line.device == 2]
    assert third[-1].exchange.uplinks > 0


def test_a_fleet_with_fewer_devices_than_clients_is_refused():
    with pytest.raises(ValueError, match="fleet of at least 3 clients, got 2"):
        run(fleet=Fleet(size=2))


def test_a_dry_run_costs_what_a_real_one_does_apart_from_zeros():
    even = data((16, 16, 16))
    real, dry = run(given=even), run(given=even, is_dry=True)
    for one, two in zip(real, dry, strict=True):
        assert one.macs == two.macs
        assert one.exchange.dense == two.exchange.dense
        assert one.exchange.nonzero <= two.exchange.nonzero
    assert dry[-1].personal is None


def test_the_given_network_is_left_as_it_is():
    net = network()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    list(simulate_split(ADASPLIT, net, data(), Fleet(size=3), setting=setting(2)))
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


def test_torch_has_one_thread_while_it_trains_and_as_many_as_before_afterwards():
    torch.set_num_threads(2)
    try:
        rounds = simulate_split(ADASPLIT, network(), data(), Fleet(size=3), setting=setting())
        next(rounds)
        assert torch.get_num_threads() == 1
        rounds.close()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
