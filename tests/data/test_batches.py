from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.data import CropFlip, ImageDataset, cycle_batches, make_batches
from pliant.rng import rng_stream

COUNT = 23
IMAGES = ImageDataset.from_tensors(
    torch.from_numpy(np.random.default_rng(0).integers(0, 256, (COUNT, 3, 6, 5), np.uint8)),
    torch.arange(COUNT) % 4,
    mean=(0.0, 0.0, 0.0),
    std=(1 / 255, 1 / 255, 1 / 255),
)
ALL = np.arange(COUNT)


@given(
    order=st.permutations(range(6)),
    address=st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 1)),
    augment=st.sampled_from([None, CropFlip(pad=2)]),
)
@settings(deadline=None)
def test_batches_do_not_depend_on_the_order_of_access(order, address, augment):
    in_order = list(make_batches(IMAGES, ALL, 4, 7, *address, augment=augment))
    for number in order:
        x, y = make_batches(IMAGES, ALL, 4, 7, *address, augment=augment)[number]
        assert torch.equal(x, in_order[number][0])
        assert torch.equal(y, in_order[number][1])


@given(size=st.integers(1, 30), seed=st.integers(0, 100))
@settings(deadline=None)
def test_every_image_comes_once_per_pass(size, seed):
    numbered = ImageDataset.from_tensors(torch.zeros(COUNT, 1, 1, 1), torch.arange(COUNT))
    batches = make_batches(numbered, ALL[3:20], size, seed, "round", 1)
    assert sorted(torch.cat([y for _, y in batches]).tolist()) == list(range(3, 20))
    assert len(batches) == -(-17 // size)


def test_a_short_last_batch_is_kept_or_dropped():
    sizes = [len(y) for _, y in make_batches(IMAGES, ALL, 10, 0)]
    full_sizes = [len(y) for _, y in make_batches(IMAGES, ALL, 10, 0, drop_short=True)]
    assert (sizes, full_sizes) == ([10, 10, 3], [10, 10])


def test_cycled_batches_are_those_of_pass_after_pass():
    cycled = list(islice(cycle_batches(IMAGES, ALL, 10, 7, "round", 1), 7))
    passes = [make_batches(IMAGES, ALL, 10, 7, "round", 1, epoch) for epoch in range(3)]
    for (x, y), (expected_x, expected_y) in zip(
        cycled, [*passes[0], *passes[1], passes[2][0]], strict=True
    ):
        assert torch.equal(x, expected_x)
        assert torch.equal(y, expected_y)


def test_the_only_batch_of_a_pass_is_never_dropped():
    assert [len(y) for _, y in make_batches(IMAGES, ALL[:3], 10, 0, drop_short=True)] == [3]


def test_a_different_address_gives_a_different_order():
    first, second = (make_batches(IMAGES, ALL, 23, 0, 1, 5, epoch)[0][1] for epoch in (0, 1))
    assert not torch.equal(first, second)


def test_labels_match_their_images():
    for x, y in make_batches(IMAGES, ALL, 4, 0):
        for image, label in zip(x, y, strict=True):
            at = (IMAGES.pixels == image.round().to(torch.uint8)).flatten(1).all(1).nonzero()
            assert int(at) % 4 == int(label)


def test_a_wrong_batch_number_or_size_is_rejected():
    with pytest.raises(IndexError, match="Expected a batch from 0 to 5, got 6"):
        make_batches(IMAGES, ALL, 4, 0)[6]
    with pytest.raises(ValueError, match="Expected batches of at least 1 image, got 0"):
        make_batches(IMAGES, ALL, 0, 0)


@given(pad=st.integers(0, 3), flip=st.booleans(), seed=st.integers(0, 1000))
@settings(deadline=None)
def test_crop_and_flip_agree_with_a_loop_over_images(pad, flip, seed):
    pixels = IMAGES.pixels
    augmented = CropFlip(pad=pad, flip=flip).apply(pixels, rng_stream(seed, "here"))
    rng = rng_stream(seed, "here")
    top = rng.integers(0, 2 * pad + 1, COUNT)
    left = rng.integers(0, 2 * pad + 1, COUNT)
    is_mirrored = rng.random(COUNT) < 0.5
    assert augmented.dtype == torch.uint8
    assert augmented.shape == pixels.shape
    for n in range(COUNT):
        padded = torch.zeros(3, 6 + 2 * pad, 5 + 2 * pad, dtype=torch.uint8)
        padded[:, pad : pad + 6, pad : pad + 5] = pixels[n]
        expected = padded[:, top[n] : top[n] + 6, left[n] : left[n] + 5]
        if is_mirrored[n] and flip:
            expected = expected.flip(2)
        assert torch.equal(augmented[n], expected)


def test_no_shift_and_no_mirroring_is_the_image():
    unchanged = CropFlip(pad=0, flip=False).apply(IMAGES.pixels, rng_stream(0, "here"))
    assert torch.equal(unchanged, IMAGES.pixels)


def test_augmentation_changes_neither_labels_nor_the_order_and_differs_from_pass_to_pass():
    one_image = np.zeros(4, np.int64)  # so that the order does not matter
    plain = cycle_batches(IMAGES, ALL, 10, 7, "round", 1)
    augmented = cycle_batches(IMAGES, ALL, 10, 7, "round", 1, augment=CropFlip(pad=2))
    for (x, y), (other_x, other_y) in islice(zip(plain, augmented, strict=True), 4):
        assert torch.equal(y, other_y)
        assert not torch.equal(x, other_x)
    passes = cycle_batches(IMAGES, one_image, 4, 7, "round", 1, augment=CropFlip(pad=2))
    first, second = (x for x, _ in islice(passes, 2))
    assert not torch.equal(first, second)
