import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pliant.data import Iid, Images
from pliant.data.federated import Source
from pliant.explore.distort import Distortion, distorted
from pliant.explore.objective import (
    Objective,
    Trial,
    bench,
    heat,
    judge,
    short_training,
    snapshot,
)
from pliant.nn.models import digits_cnn
from pliant.params import digest

HOW = Objective(batches=4, batch=8, snapshot_batches=4, evaluated=20)


def images(count, seed=0, channels=1):
    draws = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 5
    pixels = torch.randint(0, 128, (count, channels, 16, 16), generator=draws, dtype=torch.uint8)
    pixels[torch.arange(count), 0, 3 * labels] += 127
    return Images.from_tensors(pixels, labels, classes=5)


@pytest.fixture(scope="module")
def net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return digits_cnn(5, filters=(4, 6), hidden=16, side=16)


def test_the_three_parts_share_no_image_and_the_accuracys_part_is_never_trained_on(net):
    proxy = images(90)
    at = bench(net, proxy, Objective(evaluated=20, distortion=Distortion(1, 1, 1, 0.0)))
    rows = [p.tobytes() for p in proxy.pixels.numpy()]
    parts = [
        [p.tobytes() for p in part.pixels.numpy()] for part in (at.before, at.during, at.after)
    ]
    assert [len(part) for part in parts] == [35, 35, 20]
    assert sorted(row for part in parts for row in part) == sorted(rows)


def test_too_few_proxy_images_are_refused(net):
    with pytest.raises(ValueError, match="at least 8 each, got 10, 9 and 3"):
        bench(net, images(22), Objective(evaluated=3))


def test_a_short_training_is_a_function_of_start_rates_and_seed(net):
    at = bench(net, images(90), HOW)
    start = snapshot(at)
    before = digest(start)
    trial = Trial((0.25, 0.5), 7)
    assert short_training(at, start, trial) == short_training(at, start, trial)
    assert short_training(at, start, trial) != short_training(at, start, Trial((0.25, 0.5), 8))
    assert digest(start) == before


def test_a_trial_learns_and_the_network_that_was_given_does_not_change(net):
    before = digest(dict(net.state_dict()))
    how = Objective(batches=30, batch=16, snapshot_batches=2, evaluated=30)
    at = bench(net, images(150), how)
    start = snapshot(at)
    assert short_training(at, start, Trial((0.0, 0.0), 0)).loss < judge(at, start).loss
    assert digest(dict(net.state_dict())) == before


def test_device_data_is_never_touched(net):
    """Whatever the devices hold: pixels that would break training, labels that are wrong."""
    outcomes = []
    for spoiled in (False, True):
        data = Source(images(200), images(20, seed=1)).share(Iid(), 4, proxy=90)
        if spoiled:
            theirs = torch.from_numpy(np.concatenate(data.devices))
            data.train.pixels[theirs] = 255 - data.train.pixels[theirs]
            data.train.labels[theirs] = 0
            data.test.pixels.fill_(0)
        at = bench(net, data.proxy, HOW)
        outcomes.append(
            (digest(snapshot(at)), short_training(at, snapshot(at), Trial((0.3,) * 2, 0)))
        )
    assert outcomes[0] == outcomes[1]


def test_a_training_that_diverges_gives_a_number(net):
    from pliant.nn.optimiser import Sgd

    at = bench(net, images(90), Objective(batches=8, batch=8, evaluated=20, optimiser=Sgd(lr=1e6)))
    assert short_training(at, snapshot(at), Trial((0.0, 0.0), 0)).loss == 1e3


def test_the_learning_rate_falls_over_the_last_steps():
    assert [heat(step, 8, 0.5) for step in range(8)] == [1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert heat(7, 8, 0.0) == 1.0


def test_distortion_halves_what_it_says():
    pixels = torch.tensor([[[[200]], [[100]], [[0]]]], dtype=torch.uint8)
    given_image = Images.from_tensors(pixels, torch.tensor([0]), classes=2)
    found = distorted(given_image, Distortion(0.5, 1.0, 0.5), seed=0).pixels.flatten().tolist()
    grey = 0.299 * 100 + 0.587 * 50  # of the darker image
    assert found == [round(grey + (value - grey) / 2) for value in (100, 50, 0)]


@given(st.floats(0, 1), st.floats(0, 0.2))
def test_grey_images_get_contrast_and_noise_and_stay_bytes(contrast, noise):
    given_images = images(3)
    found = distorted(given_images, Distortion(contrast=contrast, noise=noise), seed=1)
    assert found.pixels.dtype == torch.uint8
    assert torch.equal(found.labels, given_images.labels)
    again = distorted(given_images, Distortion(contrast=contrast, noise=noise), seed=1)
    assert torch.equal(found.pixels, again.pixels)
    if noise == 0:
        spread = found.pixels.float().std() / given_images.pixels.float().std()
        assert float(spread) == pytest.approx(contrast, abs=0.02)
