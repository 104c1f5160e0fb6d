import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.data import ByGroup, DataGrowth, Dirichlet, Iid, ImageDataset, Shards, TrainTestData
from pliant.data.federated import resolve_proxy_size, split_train_test


def make_images(count, groups=False):
    numbers = torch.arange(count)
    return ImageDataset.from_tensors(
        numbers.view(-1, 1, 1, 1).to(torch.float32),
        numbers % 5,
        classes=5,
        groups=numbers // 4 if groups else None,
        name="numbers",
    )


@given(
    partition=st.sampled_from([Iid(), Dirichlet(alpha=0.1), Shards(classes=2), ByGroup()]),
    proxy=st.one_of(st.none(), st.integers(0, 90), st.floats(0.0, 0.5)),
    seed=st.integers(0, 50),
)
@settings(deadline=None)
def test_the_proxy_part_never_overlaps_the_devices(partition, proxy, seed):
    source = TrainTestData(make_images(200, groups=True), make_images(10))
    data = source.share(partition, devices=10, seed=seed, proxy=proxy)
    proxy_images = data.proxy.pixels.flatten().tolist()
    shared = [int(data.train.pixels[index]) for share in data.shares for index in share]
    assert sorted(proxy_images + shared) == list(range(200))
    assert proxy_images == data.proxy_indices.tolist()
    assert len(proxy_images) == resolve_proxy_size(200, proxy)


def test_the_proxy_part_is_the_same_for_every_partition():
    source = TrainTestData(make_images(200), make_images(10))
    iid = source.share(Iid(), devices=10, seed=3)
    skewed = source.share(Dirichlet(alpha=0.1), devices=7, seed=3)
    assert np.array_equal(iid.proxy_indices, skewed.proxy_indices)
    other = source.share(Iid(), devices=10, seed=4)
    assert not np.array_equal(iid.proxy_indices, other.proxy_indices)


@pytest.mark.parametrize(
    ("samples", "proxy", "size"),
    [
        (50_000, None, 2500),
        (8_000, None, 1000),
        (100, None, 20),
        (100, 7, 7),
        (100, 0.1, 10),
        (100, 0, 0),
    ],
)
def test_the_size_of_the_proxy_part(samples, proxy, size):
    assert resolve_proxy_size(samples, proxy) == size


@pytest.mark.parametrize("proxy", [-1, 100, 1.0, 2.0, -0.5])
def test_a_proxy_part_that_leaves_nothing_is_rejected(proxy):
    with pytest.raises(ValueError, match="Expected a proxy part of 0 to 99 images"):
        resolve_proxy_size(100, proxy)


def test_a_device_gets_the_images_of_its_share():
    data = TrainTestData(make_images(100), make_images(10)).share(Iid(), devices=4)
    assert len(data) == 4
    assert data.sizes() == (20, 20, 20, 20)
    images = data.train.select(data.shares[2])
    assert images.pixels.flatten().tolist() == data.shares[2].tolist()
    assert torch.equal(images.labels, data.train.labels[data.shares[2]])


def test_the_number_of_devices_defaults_to_one_per_writer():
    data = TrainTestData(make_images(100, groups=True), make_images(10)).share(ByGroup(), proxy=0)
    assert len(data) == 25
    with pytest.raises(ValueError, match="numbers: expected a number of devices, got none"):
        TrainTestData(make_images(100), make_images(10)).share(Iid())


def test_more_devices_than_samples_are_rejected():
    with pytest.raises(ValueError, match="Expected at most 80 devices for 80 samples, got 81"):
        TrainTestData(make_images(100), make_images(10)).share(Iid(), devices=81)


def test_a_summary_names_all_parts():
    data = TrainTestData(make_images(100), make_images(10)).share(Iid(), devices=4)
    assert data.summary() == (
        "numbers: 4 devices with 20 to 20 images (median 20) of 4 to 5 classes (median 5); "
        "proxy 20, test 10"
    )


def test_a_test_part_is_drawn_by_the_seed():
    first, second = (split_train_test(make_images(100), test=0.2, seed=seed) for seed in (0, 1))
    assert (len(first.train), len(first.test)) == (80, 20)
    all_pixels = torch.cat([first.train.pixels, first.test.pixels]).flatten().tolist()
    assert sorted(all_pixels) == list(range(100))
    assert not torch.equal(first.test.pixels, second.test.pixels)
    with pytest.raises(ValueError, match="expected a test share between 0 and 1, got"):
        split_train_test(make_images(100), test=1.5, seed=0)
    with pytest.raises(ValueError, match="expected at least 2 images to split, got 1"):
        split_train_test(make_images(1), test=0.5, seed=0)


@given(proxy_seed=st.integers(0, 50), partition=st.sampled_from([Iid(), Dirichlet(alpha=0.1)]))
@settings(deadline=None, max_examples=20)
def test_a_proxy_seed_holds_back_the_same_images_in_every_run(proxy_seed, partition):
    source = TrainTestData(make_images(200), make_images(10))
    proxy_indices = set(source.share(Iid(), 1, seed=proxy_seed, proxy=40).proxy_indices.tolist())
    for seed in range(5):
        data = source.share(partition, devices=4, seed=seed, proxy=40, proxy_seed=proxy_seed)
        assert set(data.proxy_indices.tolist()) == proxy_indices
        owned = [index for share in data.shares for index in share.tolist()]
        assert sorted(owned) == sorted(set(range(200)) - proxy_indices)


class FirstTakesAll:
    def split(self, labels, devices, seed, groups=None):
        return (np.arange(len(labels)), *[np.zeros(0, np.int64)] * (devices - 1))


def test_a_device_without_images_is_refused():
    source = TrainTestData(make_images(10), make_images(10))
    message = "numbers: expected training images on every device, found none on device 1"
    with pytest.raises(ValueError, match=message):
        source.share(FirstTakesAll(), devices=3, proxy=0)


@pytest.mark.parametrize("part", ["train", "test", "partition"])
def test_a_digest_changes_with_its_own_part_only(part):
    train, test = make_images(20), make_images(10)
    before = TrainTestData(train, test).share(Iid(), devices=4, proxy=0).compute_digests()
    if part != "partition":
        (train if part == "train" else test).labels[9] = 0
    devices = 5 if part == "partition" else 4
    after = TrainTestData(train, test).share(Iid(), devices=devices, proxy=0).compute_digests()
    assert [name for name in before if before[name] != after[name]] == [part]


def test_a_device_has_at_least_one_image_and_in_the_end_all():
    growth = DataGrowth(start=0.0, rate=0.25)
    assert [growth.count_samples(8, now) for now in (0.0, 1.0, 2.5, 4.0, 99.0)] == [1, 2, 5, 8, 8]
