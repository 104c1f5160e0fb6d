import dataclasses

import pytest
import torch
from msgspec.structs import replace
from tests.engine.small_runs import FLEET, LOCAL, SETTINGS, data, network
from tests.methods.tiny_runs import get_weights, make_batch, make_net, make_state, make_update

from pliant.data import DataGrowth
from pliant.engine.ledger import TaskRecord, verify_records
from pliant.engine.run_store import read_records
from pliant.engine.simulate import simulate
from pliant.methods import AsoFed, FedAsync, FedAvg, LocalTraining
from pliant.methods.asofed import _weight_features
from pliant.nn.optimisers import Sgd
from pliant.workers.pool import ProcessWorkers

PLAIN = AsoFed(LocalTraining(Sgd(lr=1.0)), mu=0.0, beta=0.5, devices=4)


def train(method, steps, device_state=None, num_samples=1):
    net = make_net()
    state = make_state(net, method)
    batches = [make_batch(1.0)] * steps
    samples = {"num_samples": num_samples, "device_state": device_state}
    return net, state, make_update(method, net, state, 0, batches, **samples)


def gradient_at(a):
    """Return the gradient with respect to a, where b = -a, for x = 1 of class 0."""
    return torch.sigmoid(torch.tensor(2.0 * a)).item() - 1.0


def test_steps_go_along_the_change_of_the_gradient_and_the_balance_of_the_past():
    _, _, update = train(PLAIN, 3)
    first = gradient_at(0.0)  # -0.5: nothing is known of the past
    a = -first
    second = gradient_at(a)
    a -= second - first  # the balance is still 0
    third = gradient_at(a)
    a -= third - second + 0.5 * first
    assert update.delta["0.weight"].flatten()[0].item() == pytest.approx(a, rel=1e-6)
    kept = update.device_state
    balance = 0.5 * (0.5 * first) + 0.5 * second
    assert kept.balance["0.weight"].flatten()[0].item() == pytest.approx(balance, rel=1e-6)
    assert kept.gradient["0.weight"].flatten()[0].item() == pytest.approx(third, rel=1e-6)


def test_devices_continue_with_what_they_kept():
    _, _, update = train(PLAIN, 1)
    _, _, again = train(PLAIN, 1, update.device_state)
    assert again.delta["0.weight"].abs().max() == 0.0  # the same gradient, and no balance yet


def test_the_proximal_term_pulls_towards_what_was_sent():
    _, _, free = train(PLAIN, 2)
    _, _, held = train(replace(PLAIN, mu=1.0), 2)
    # at the second step the drift is 0.5, which its gradient gets
    difference = free.delta["0.weight"] - held.delta["0.weight"]
    assert difference.flatten().tolist() == pytest.approx([0.5, -0.5])


def test_a_delta_counts_by_the_share_of_its_samples():
    net, state, update = train(PLAIN, 1, num_samples=30)
    state = PLAIN.merge(net, state, [update])  # four devices of 30 samples each
    assert get_weights(state) == [0.5 / 4, -0.5 / 4]
    other = dataclasses.replace(update, device=1, num_samples=10)
    state = PLAIN.merge(net, state, [other])  # four devices of 20 on average
    assert get_weights(state) == pytest.approx([0.5 / 4 + 0.5 / 8, -0.5 / 4 - 0.5 / 8])


def test_the_learning_rate_grows_with_the_logarithm_of_the_delay():
    net, state, update = train(PLAIN, 1)
    for seconds in (50.0, 150.0):
        state = PLAIN.merge(net, state, [dataclasses.replace(update, seconds=seconds)])
    assert PLAIN.scale_lr(state, 0) == pytest.approx(4.605170186)  # log(100)
    assert PLAIN.scale_lr(state, 1) == 1.0
    fast = PLAIN.merge(net, state, [dataclasses.replace(update, device=1, seconds=1.0)])
    assert PLAIN.scale_lr(fast, 1) == 1.0


def test_features_are_off_and_shrink_the_first_layer():
    net, state, update = train(PLAIN, 1)
    assert get_weights(PLAIN.merge(net, state, [update])) == [0.125, -0.125]
    wide = torch.tensor([[0.0, 1.0]])
    weighted = _weight_features(net, state.params | {"0.weight": wide.view(1, 2, 1, 1)})
    assert weighted["0.weight"].flatten().tolist() == pytest.approx([0.0, 0.731058579])


GROWTH = DataGrowth(start=0.3, rate=0.1)


def run(method, folder=None, *, stop=10**6, growth=GROWTH, **options):
    growing = data() if growth is None else data().grow(growth, 0)
    settings = replace(SETTINGS, rounds=8, checkpoint_every=1)
    records = simulate(
        method, network(), growing, FLEET, settings=settings, folder=folder, **options
    )
    return [record for record, _ in zip(records, range(stop), strict=False)]


METHODS = [AsoFed(LOCAL, concurrency=4), FedAsync(local=LOCAL), FedAvg(LOCAL)]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_runs_on_growing_data_resume_exactly(method, tmp_path):
    whole = run(method, tmp_path / "whole")
    run(method, tmp_path / "parts", stop=5)
    assert run(method, tmp_path / "parts")[-1].digest == whole[-1].digest
    assert verify_records(read_records(tmp_path / "whole")) == 8


def test_workers_see_the_same_data(tmp_path):
    method = METHODS[0]
    assert run(method)[-1].digest == run(method, workers=ProcessWorkers(2))[-1].digest


def test_devices_train_on_what_has_arrived(tmp_path):
    run(FedAsync(local=LOCAL), tmp_path)
    tasks = [r for r in read_records(tmp_path) if isinstance(r, TaskRecord) and r.steps]
    sizes = data().sizes()  # 25
    assert {task.outcome for task in tasks} == {"finished"}
    for task in tasks:
        assert task.samples == int((0.3 + 0.1 * task.sent_at) * sizes[task.device] + 1e-9)
    assert len({task.samples for task in tasks}) > 1


def test_data_that_is_all_there_is_only_in_another_order():
    complete = run(FedAvg(LOCAL), growth=DataGrowth(start=1.0))
    plain = run(FedAvg(LOCAL), growth=None)
    assert [record.samples for record in complete] == [record.samples for record in plain]
    sizes = {len(set(share.tolist())) for share in data().grow(GROWTH, 0).shares}
    assert sizes == set(data().sizes())
