import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.data import ByGroup, Dirichlet, Iid, Images, Shards, Source
from pliant.data.federated import proxy_size, split_source


def images(count, groups=False):
    numbers = torch.arange(count)
    return Images.from_tensors(
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
    source = Source(images(200, groups=True), images(10))
    data = source.share(partition, devices=10, seed=seed, proxy=proxy)
    held = data.proxy.pixels.flatten().tolist()
    shared = [
        value for device in range(10) for value in data.shard(device).pixels.flatten().tolist()
    ]
    assert sorted(held + shared) == list(range(200))
    assert held == data.proxy_indices.tolist()
    assert len(held) == proxy_size(200, proxy)


def test_the_proxy_part_is_the_same_for_every_partition():
    source = Source(images(200), images(10))
    one = source.share(Iid(), devices=10, seed=3)
    two = source.share(Dirichlet(alpha=0.1), devices=7, seed=3)
    assert np.array_equal(one.proxy_indices, two.proxy_indices)
    other = source.share(Iid(), devices=10, seed=4)
    assert not np.array_equal(one.proxy_indices, other.proxy_indices)


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
    assert proxy_size(samples, proxy) == size


@pytest.mark.parametrize("proxy", [-1, 100, 1.0, 2.0, -0.5])
def test_a_proxy_part_that_leaves_nothing_is_refused(proxy):
    with pytest.raises(ValueError, match="Expected a proxy part of 0 to 99 images"):
        proxy_size(100, proxy)


def test_a_shard_has_the_images_of_its_device():
    data = Source(images(100), images(10)).share(Iid(), devices=4)
    assert len(data) == 4
    assert data.sizes() == (20, 20, 20, 20)
    assert data.shard(2).pixels.flatten().tolist() == data.devices[2].tolist()
    assert torch.equal(data.shard(2).labels, data.train.labels[data.devices[2]])


def test_without_a_number_there_is_a_device_for_each_writer():
    data = Source(images(100, groups=True), images(10)).share(ByGroup(), proxy=0)
    assert len(data) == 25
    with pytest.raises(ValueError, match="numbers: expected a number of devices, got none"):
        Source(images(100), images(10)).share(Iid())


def test_more_devices_than_samples_are_refused():
    with pytest.raises(ValueError, match="Expected at most 80 devices for 80 samples, got 81"):
        Source(images(100), images(10)).share(Iid(), devices=81)


def test_a_summary_names_all_parts():
    data = Source(images(100), images(10)).share(Iid(), devices=4)
    assert data.summary() == (
        "numbers: 4 devices with 20 to 20 images (median 20) of 4 to 5 classes (median 5); "
        "proxy 20, test 10"
    )


def test_a_test_part_is_drawn_by_the_seed():
    one, two = (split_source(images(100), test=0.2, seed=seed) for seed in (0, 1))
    assert (len(one.train), len(one.test)) == (80, 20)
    both = torch.cat([one.train.pixels, one.test.pixels]).flatten().tolist()
    assert sorted(both) == list(range(100))
    assert not torch.equal(one.test.pixels, two.test.pixels)
    with pytest.raises(ValueError, match="expected a test share between 0 and 1, got"):
        split_source(images(100), test=1.5, seed=0)
    with pytest.raises(ValueError, match="expected at least 2 images to split, got 1"):
        split_source(images(1), test=0.5, seed=0)


@given(chosen=st.integers(0, 50), partition=st.sampled_from([Iid(), Dirichlet(alpha=0.1)]))
@settings(deadline=None, max_examples=20)
def test_with_a_seed_of_its_own_the_proxy_part_is_nobodys_in_any_run(chosen, partition):
    source = Source(images(200), images(10))
    seen = set(source.share(Iid(), 1, seed=chosen, proxy=40).proxy_indices.tolist())
    for seed in range(5):
        data = source.share(partition, devices=4, seed=seed, proxy=40, proxy_seed=chosen)
        assert set(data.proxy_indices.tolist()) == seen
        owned = [index for share in data.devices for index in share.tolist()]
        assert sorted(owned) == sorted(set(range(200)) - seen)
