import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.small_runs import images, network

from pliant.data import Iid, ImageDataset
from pliant.data.federated import TrainTestData
from pliant.nn.optimisers import Sgd
from pliant.params import digest
from pliant.table_search.distortion import Distortion, distort_images
from pliant.table_search.short_training import (
    ShortTrainingSettings,
    Trial,
    evaluate_on_proxy,
    lr_factor,
    make_search_context,
    run_short_training,
    train_snapshot,
)

SETTINGS = ShortTrainingSettings(batches=4, batch=8, snapshot_batches=4, eval_images=20)


@pytest.fixture(scope="module")
def net():
    return network()


def test_the_three_parts_of_the_proxy_images_are_disjoint(net):
    proxy = images(90)
    settings = ShortTrainingSettings(eval_images=20, distortion=Distortion(1, 1, 1, 0.0))
    context = make_search_context(net, proxy, settings)
    parts = (context.snapshot_images, context.train_images, context.eval_images)
    assert [len(part) for part in parts] == [35, 35, 20]
    pixels = np.concatenate([part.pixels.numpy() for part in parts])
    assert sorted(p.tobytes() for p in pixels) == sorted(p.tobytes() for p in proxy.pixels.numpy())


def test_too_few_proxy_images_are_refused(net):
    with pytest.raises(ValueError, match="at least 8 each, got 10, 9 and 3"):
        make_search_context(net, images(22), ShortTrainingSettings(eval_images=3))


def test_a_short_training_is_a_function_of_snapshot_rates_and_seed(net):
    context = make_search_context(net, images(90), SETTINGS)
    params = train_snapshot(context)
    before = digest(params)
    outcomes = [run_short_training(context, params, Trial((0.25, 0.5), seed)) for seed in (7, 7, 8)]
    assert outcomes[0] == outcomes[1] != outcomes[2]
    assert digest(params) == before


def test_a_trial_learns_and_leaves_the_callers_network_unchanged(net):
    before = digest(dict(net.state_dict()))
    settings = ShortTrainingSettings(batches=30, batch=16, snapshot_batches=2, eval_images=30)
    context = make_search_context(net, images(150), settings)
    params = train_snapshot(context)
    outcome = run_short_training(context, params, Trial((0.0, 0.0), 0))
    assert outcome.loss < evaluate_on_proxy(context, params).loss
    assert digest(dict(net.state_dict())) == before


def test_device_data_is_never_touched(net):
    """Device images with inverted pixels and wrong labels change nothing."""
    outcomes = []
    for is_spoiled in (False, True):
        data = TrainTestData(images(200), images(20, seed=1)).share(Iid(), 4, proxy=90)
        if is_spoiled:
            rows = torch.from_numpy(np.concatenate(data.shares))
            data.train.pixels[rows] = 255 - data.train.pixels[rows]
            data.train.labels[rows] = 0
            data.test.pixels.fill_(0)
        context = make_search_context(net, data.proxy, SETTINGS)
        params = train_snapshot(context)
        trial = Trial((0.3,) * 2, 0)
        outcomes.append((digest(params), run_short_training(context, params, trial)))
    assert outcomes[0] == outcomes[1]


def test_a_training_that_diverges_gives_a_number(net):
    settings = ShortTrainingSettings(batches=8, batch=8, eval_images=20, optimiser=Sgd(lr=1e6))
    context = make_search_context(net, images(90), settings)
    assert run_short_training(context, train_snapshot(context), Trial((0.0, 0.0), 0)).loss == 1e3


def test_the_learning_rate_falls_over_the_last_steps():
    assert [lr_factor(step, 8, 0.5) for step in range(8)] == [1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert lr_factor(7, 8, 0.0) == 1.0


def test_distortion_halves_brightness_and_saturation():
    pixels = torch.tensor([[[[200]], [[100]], [[0]]]], dtype=torch.uint8)
    image = ImageDataset.from_tensors(pixels, torch.tensor([0]), classes=2)
    distorted = distort_images(image, Distortion(0.5, 1.0, 0.5), seed=0)
    grey = 0.299 * 100 + 0.587 * 50  # of the darker image
    expected = [round(grey + (value - grey) / 2) for value in (100, 50, 0)]
    assert distorted.pixels.flatten().tolist() == expected


@given(st.floats(0, 1), st.floats(0, 0.2))
def test_grey_images_get_contrast_and_noise_and_stay_bytes(contrast, noise):
    original, distortion = images(3), Distortion(contrast=contrast, noise=noise)
    distorted, again = (distort_images(original, distortion, seed=1) for _ in range(2))
    assert distorted.pixels.dtype == torch.uint8
    assert torch.equal(distorted.labels, original.labels)
    assert torch.equal(distorted.pixels, again.pixels)
    if noise == 0:
        spread = distorted.pixels.float().std() / original.pixels.float().std()
        assert float(spread) == pytest.approx(contrast, abs=0.02)
