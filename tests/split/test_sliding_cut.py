"""SplitFed with a cut that slides with the speed of a device: other costs, the same learning."""

import pytest
import torch
from tests.deploy.grpc_in_process import make_experiment, make_server_run
from tests.split.small_split import LOCAL, make_data, make_network, run

from pliant.devices import ChangingTrace, ConstantTrace, DeviceClass, Fleet
from pliant.engine.ledger import verify_records
from pliant.engine.run_store import load_run_state, read_records
from pliant.engine.split_loop import SplitClientState, SplitState
from pliant.split import SplitFed
from pliant.split.session import CUTS_STATE, Session

PLAIN, SLIDING = SplitFed(local=LOCAL), SplitFed(local=LOCAL, slide=("stage2", "stage4"))
CUTS = ("stage1", "stage2", "stage4")
LINKED = (DeviceClass(up=1e5, down=2e5, latency=0.01),)
# slow devices with fast links had better send much, and fast devices with slow links compute much
UNEQUAL = Fleet(
    size=3,
    macs_per_second=1e7,
    classes=(
        DeviceClass(speed=ConstantTrace(low=0.1, high=0.1), up=1e6, down=1e6),
        DeviceClass(speed=ConstantTrace(low=1.0, high=1.0), up=2e4, down=2e4),
    ),
)
CHANGING = Fleet(
    size=3,
    macs_per_second=2e7,
    round_seconds=1.0,
    speed=ChangingTrace(low=0.01, high=1.0, per_round=1.0),
    classes=LINKED,
)


def load_state(folder):
    return load_run_state(folder, SplitState, SplitClientState)


def load_networks(folder):
    """Return the whole network of each client and the index of its cut."""
    state = load_state(folder)
    cuts = state.server_state.method_state.get(CUTS_STATE, {})
    networks = []
    for _, client in sorted(state.device_states.items()):
        part = {
            name.removeprefix("params/device."): tensor
            for name, tensor in client.part.items()
            if name.startswith("params/")
        }
        common = state.server_state.params
        server = {
            name.removeprefix("common/params/"): tensor
            for name, tensor in common.items()
            if name.startswith("common/params/")
        }
        networks.append(server | part)
    return networks, [int(cuts.get(str(client), 0)) for client in state.device_states]


def test_a_cut_that_slides_changes_where_layers_run_and_not_what_is_learnt(tmp_path):
    run(PLAIN, fleet=UNEQUAL, folder=tmp_path / "plain")
    run(SLIDING, fleet=UNEQUAL, folder=tmp_path / "sliding")
    (plain, _), (sliding, cuts) = (load_networks(tmp_path / n) for n in ("plain", "sliding"))
    assert len(set(cuts)) == 2
    for network, other in zip(plain, sliding, strict=True):
        assert network.keys() == other.keys()
        for name, tensor in network.items():
            assert torch.allclose(tensor, other[name], atol=1e-5), name


def test_a_cut_that_stays_is_the_plain_method_bit_for_bit(tmp_path):
    slow = Fleet(size=3, macs_per_second=1e3, classes=LINKED)
    plain = run(PLAIN, fleet=slow, folder=tmp_path / "plain")
    sliding = run(SLIDING, fleet=slow, folder=tmp_path / "sliding")
    assert sliding[-1].digest == plain[-1].digest
    files = [(tmp_path / name / "events.jsonl").read_bytes() for name in ("plain", "sliding")]
    assert files[0] == files[1]


def test_every_fixed_cut_is_slower():
    def measure(method):
        data = make_data((80, 80, 80))
        return run(method, fleet=UNEQUAL, data=data, rounds=2, is_dry=True)[-1].seconds

    fixed = [measure(SplitFed(cut=cut, local=LOCAL)) for cut in CUTS]
    assert 1.5 * measure(SLIDING) < min(fixed)


def test_layers_that_are_new_to_a_client_are_charged(tmp_path):
    fast = Fleet(size=3, macs_per_second=1e12, classes=LINKED)
    sliding = run(SLIDING, fleet=fast, folder=tmp_path)
    fixed = run(SplitFed(cut="stage4", local=LOCAL), fleet=fast)
    session = Session(SLIDING, make_network(), make_data(), fast, seed=0)
    extra = session.sides[2].device_bytes - session.sides[0].device_bytes
    assert [r.down - f.down for r, f in zip(sliding, fixed, strict=True)] == [3 * extra, 0, 0, 0]
    assert [record.up for record in sliding] == [record.up for record in fixed]
    assert [record.macs for record in sliding] == [record.macs for record in fixed]
    assert verify_records(read_records(tmp_path)) == 4


def test_a_run_whose_cuts_move_resumes_with_the_same_bits(tmp_path):
    whole = run(SLIDING, fleet=CHANGING, rounds=6, folder=tmp_path / "whole")
    run(SLIDING, fleet=CHANGING, rounds=6, folder=tmp_path / "resumed", stop=5)
    resumed = run(SLIDING, fleet=CHANGING, rounds=6, folder=tmp_path / "resumed")
    assert resumed[-1].digest == whole[-1].digest
    files = [(tmp_path / name / "events.jsonl").read_bytes() for name in ("whole", "resumed")]
    assert files[0] == files[1]


def test_one_server_s_part_has_one_cut():
    with pytest.raises(ValueError, match="cannot train one server's part"):
        SplitFed(version=2, slide=("stage2",))


def test_a_cut_must_not_be_before_the_first_one():
    method = SplitFed(cut="stage2", slide=("stage1",))
    with pytest.raises(ValueError, match="more layers on the device than 'stage2'"):
        Session(method, make_network(), make_data(), Fleet(size=3), seed=0)


def test_devices_keep_one_part(tmp_path):
    experiment = make_experiment(tmp_path, "splitfed", fields={"slide": ["stage2"]})
    with pytest.raises(ValueError, match="a device keeps one part"):
        make_server_run(experiment)
