"""The mean of the network over the rounds, which is tested and kept instead of the last one."""

from fractions import Fraction

import pytest
import torch
from msgspec.structs import replace
from tests.engine.small_runs import FLEET, LOCAL, SETTINGS, data, network, run
from torch.func import functional_call

from pliant.engine.evaluation import Evaluation
from pliant.engine.ledger import RoundRecord
from pliant.engine.round_rules import RoundRules
from pliant.engine.run_store import load_run_state, load_trained_params, read_records
from pliant.engine.simulate import simulate
from pliant.methods import (
    Distreal,
    FedAvg,
    FedBuff,
    FedMd,
    Progressive,
    ServerSgd,
    Stage,
)
from pliant.methods.base import ServerState
from pliant.nn.norm_statistics import RunningStats
from pliant.params import digest, update_average

FEDAVG = FedAvg(LOCAL, server=ServerSgd(momentum=0.5))
AVERAGED = replace(SETTINGS, ema_decay=0.6)
# Round n has a share of 1 - min(0.6, n / (n + 1)): 1, a half, and then 0.4.
SHARES = [
    [Fraction(1)],
    [Fraction(1, 2)] * 2,
    [Fraction(3, 10)] * 2 + [Fraction(4, 10)],
    [Fraction(18, 100)] * 2 + [Fraction(24, 100), Fraction(4, 10)],
]


def run_rounds(folder, count, settings):
    run(FEDAVG, settings=replace(settings, rounds=count), folder=folder / str(count))
    return load_trained_params(folder / str(count))


def test_the_kept_network_is_the_mean_of_the_rounds(tmp_path):
    rounds = [run_rounds(tmp_path / "last", count, SETTINGS) for count in (1, 2, 3, 4)]
    for count, shares in enumerate(SHARES, start=1):
        average = run_rounds(tmp_path / "mean", count, AVERAGED)
        for name, tensor in average.items():
            values = zip(shares, rounds, strict=False)
            expected = sum(float(share) * params[name].double() for share, params in values)
            assert torch.allclose(tensor.double(), expected, rtol=0, atol=1e-6)
    assert not torch.allclose(average["classifier.1.weight"], rounds[-1]["classifier.1.weight"])


def test_integers_are_those_of_the_last_round():
    average = update_average({"n": torch.tensor(3)}, {"n": torch.tensor(8)}, 0.9, 5)
    assert average["n"].item() == 8


def test_training_does_not_depend_on_the_average(tmp_path):
    plain = run(FEDAVG, folder=tmp_path / "plain")
    averaged = run(FEDAVG, settings=AVERAGED, folder=tmp_path / "mean")
    assert [record.loss for record in averaged] == [record.loss for record in plain]
    states = [load_run_state(tmp_path / name, ServerState) for name in ("plain", "mean")]
    assert digest(states[0].server_state.params) == digest(states[1].server_state.params)
    assert averaged[-1].score != plain[-1].score
    assert not states[0].average


def test_the_average_is_what_is_tested_and_kept(tmp_path):
    settings = replace(AVERAGED, evaluation=Evaluation(statistics=RunningStats()))
    records = run(FEDAVG, settings=settings, folder=tmp_path)
    params, test = load_trained_params(tmp_path), data().test
    assert digest(params) == records[-1].digest
    output = functional_call(network().eval(), params, (test.get_normalised(slice(len(test))),))
    accuracy = (output.argmax(1) == test.labels).double().mean().item()
    assert records[-1].accuracy == pytest.approx(accuracy)


@pytest.mark.parametrize(
    "method",
    [
        Distreal(local=LOCAL),
        FedBuff(FEDAVG, buffer=2),
        Progressive(stages=(Stage(0.5, width=0.5), Stage()), local=LOCAL),
    ],
    ids=["distreal", "fedbuff", "progressive"],
)
def test_a_resumed_run_has_the_same_average(tmp_path, method):
    def count_rounds(folder):
        return sum(isinstance(record, RoundRecord) for record in read_records(folder))

    whole = run(method, settings=AVERAGED, folder=tmp_path / "whole")
    folder = tmp_path / "stopped"
    for stop in (1, 3, 4):
        run(
            method,
            settings=AVERAGED,
            folder=folder,
            is_stopped=lambda stop=stop: count_rounds(folder) >= stop,
        )
    assert run(method, settings=AVERAGED, folder=folder)[-1] == whole[-1]
    assert whole[-1].digest is not None
    events = [(tmp_path / name / "events.jsonl").read_bytes() for name in ("whole", "stopped")]
    assert events[0] == events[1]


def test_a_round_without_updates_leaves_the_average_as_it_is(tmp_path):
    settings = replace(AVERAGED, rules=RoundRules(late="partial", dropout=0.2, quorum=1.0))
    records = run(FEDAVG, settings=settings)
    merged = [record.merged > 0 for record in records]
    void = next(number for number in range(2, 6) if merged[number - 1] and not merged[number])
    digests = [digest(run_rounds(tmp_path, count, settings)) for count in (void, void + 1)]
    assert digests[0] == digests[1]


def test_a_method_without_a_shared_network_has_no_average():
    message = "Expected no `ema_decay` for FedMd, each of whose devices has its own network"
    with pytest.raises(ValueError, match=message):
        list(simulate(FedMd(LOCAL), network(), data(), FLEET, settings=AVERAGED))
