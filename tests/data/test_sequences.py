"""Signals and token sequences go the way of images."""

import pytest
import torch

import pliant as pl
from pliant.data import TrainTestData
from pliant.experiment.build import build_network
from pliant.experiment.config import NetworkConfig


def test_tokens_stay_integers():
    tokens = torch.tensor([[3, 1], [0, 7]], dtype=torch.int32)
    samples = pl.ImageDataset.from_tensors(tokens, torch.tensor([0, 1]))
    assert (samples.shape, samples.vocabulary, samples.mean) == ((2,), 8, ())
    assert torch.equal(samples.get_normalised(), tokens.long())
    assert samples.select([1]).get_normalised().tolist() == [[0, 7]]


def test_signals_are_normalised_by_channel():
    signals = torch.tensor([[[0, 255], [51, 51]]], dtype=torch.uint8)
    samples = pl.ImageDataset.from_tensors(signals, torch.tensor([0]))
    assert samples.shape == (2, 2)
    assert samples.mean == pytest.approx((0.5, 0.2))
    assert samples.get_normalised().tolist() == [[[-1, 1], [0, 0]]]


@pytest.mark.parametrize(
    ("shape", "dtype", "says"),
    [
        ((4,), torch.float32, r"signals \(n, channel, time\) or tokens \(n, length\), got \(4,\)"),
        ((4, 3), torch.float32, "expected tokens as int64, got torch.float32"),
        ((4, 3, 5), torch.int64, "expected images as uint8 or float, got torch.int64"),
    ],
)
def test_other_samples_are_refused_in_one_line(shape, dtype, says):
    with pytest.raises(ValueError, match=says):
        pl.ImageDataset.from_tensors(
            torch.zeros(shape, dtype=dtype), torch.zeros(4, dtype=torch.int64)
        )


def test_images_alone_are_cropped_and_resized():
    signals = torch.zeros(2, 3, 8)
    with pytest.raises(ValueError, match=r"to crop, got samples \(3, 8\)"):
        pl.CropFlip().apply(signals, pl.rng_stream(0, "crop"))
    with pytest.raises(ValueError, match=r"to resize, got samples \(3, 8\)"):
        pl.InputScale(side=4).apply(signals, torch.zeros(2))


def make_text():
    """Make sequences whose class is which half of the tokens is common."""
    rng = pl.rng_stream(0, "text")
    labels = torch.arange(480) % 2
    common = torch.from_numpy(rng.integers(1, 8, (480, 12))) + 7 * labels[:, None]
    noise = torch.from_numpy(rng.integers(0, 15, (480, 12)))
    tokens = torch.where(torch.from_numpy(rng.random((480, 12)) < 0.5), common, noise)
    return tokens, labels


def make_signals():
    """Make two channels of waves whose class is their frequency."""
    rng = pl.rng_stream(0, "signals")
    labels = torch.arange(480) % 2
    time = torch.linspace(0, 6.28, 24)
    waves = torch.sin(time * (2 + 2 * labels[:, None]))[:, None, :].repeat(1, 2, 1)
    noise = torch.from_numpy(rng.standard_normal((480, 2, 24), "float32"))
    return waves + noise, labels


@pytest.mark.parametrize("kind", [pl.Distreal, pl.Progressive])
@pytest.mark.parametrize(
    ("make", "network"),
    [
        (make_text, NetworkConfig(name="text_transformer", options={"width": 16, "depth": 1})),
        (make_signals, NetworkConfig(name="signal_cnn")),
    ],
)
def test_a_federation_learns(make, network, kind):
    samples, labels = make()
    parts = (slice(0, 400), slice(400, None))
    train, test = (pl.ImageDataset.from_tensors(samples[p], labels[p]) for p in parts)
    data = TrainTestData(train=train, test=test).share(pl.Iid(), devices=4, proxy=40)
    net = build_network(network, data, seed=0)
    local = pl.LocalTraining(batch=8, optimiser=pl.Adam(lr=0.01))
    fleet = pl.Fleet(size=4, speed=pl.ConstantTrace(low=0.5, high=1.0))
    settings = pl.RunSettings(per_round=4, rules=pl.RoundRules(late="partial"))
    method = kind(local=local)
    records = [*pl.simulate(method, net, data, fleet, rounds=4, settings=settings)]
    assert records[-1].accuracy > 0.8
