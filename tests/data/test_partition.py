import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.data import AnyPartition, ByGroup, Dirichlet, Iid, LogNormalSizes, Shards
from pliant.data.partition import apportion, summarise_shares
from pliant.value import decode

partitions = st.one_of(
    st.just(Iid()),
    st.builds(LogNormalSizes, spread=st.floats(0.0, 3.0)),
    st.builds(Dirichlet, alpha=st.sampled_from([1e-3, 0.05, 0.5, 10.0, 1e6])),
    st.builds(Shards, classes=st.integers(1, 3)),
    st.just(ByGroup()),
)


@given(
    partition=partitions,
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    devices=st.integers(1, 20),
    seed=st.integers(0, 5),
)
@settings(deadline=None, max_examples=300)
def test_each_index_is_used_once_and_no_device_is_empty(partition, labels, devices, seed):
    label_array = np.array(labels, np.int64)
    groups = np.arange(len(labels)) % 25
    try:
        shares = partition.split(label_array, devices, seed, groups)
    except ValueError as error:
        assert str(error).startswith("Expected")  # noqa: PT017 - an error is one of two valid outcomes
        assert isinstance(partition, Shards | ByGroup) or devices > len(labels)
        return
    assert len(shares) == devices
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(labels)))
    assert all(len(share) for share in shares)
    assert all((np.diff(share) > 0).all() for share in shares)


@given(partition=partitions, seed=st.integers(0, 1000))
@settings(deadline=None)
def test_the_same_seed_gives_the_same_shares(partition, seed):
    labels, groups = np.arange(60) % 5, np.arange(60) // 3
    first, second = (partition.split(labels, 10, seed, groups) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("partition", [Iid(), LogNormalSizes(), Dirichlet(), Shards()])
def test_a_different_seed_gives_different_shares(partition):
    labels = np.arange(100) % 5
    first, second = (partition.split(labels, 10, seed) for seed in (0, 1))
    assert not all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("partition", [Iid(), LogNormalSizes(), Dirichlet(), Shards(), ByGroup()])
def test_more_devices_than_samples_are_rejected(partition):
    with pytest.raises(ValueError, match="Expected at most 5 devices for 5 samples, got 6"):
        partition.split(np.zeros(5, np.int64), 6, 0, np.arange(5))
    with pytest.raises(ValueError, match="Expected at least 1 device, got 0"):
        partition.split(np.zeros(5, np.int64), 0, 0, np.arange(5))


def measure_skew(alpha, seed):
    """Return the mean distance of the devices' class shares from those of all samples."""
    labels = np.arange(2000) % 5
    shares = Dirichlet(alpha=alpha).split(labels, 10, seed)
    rows = np.stack([np.bincount(labels[share], minlength=5) / len(share) for share in shares])
    return np.abs(rows - 0.2).sum(axis=1).mean()


@given(seed=st.integers(0, 10_000))
@settings(deadline=None, max_examples=30)
def test_dirichlet_tends_to_iid_as_alpha_grows(seed):
    small, middle, large = (measure_skew(alpha, seed) for alpha in (0.05, 5.0, 1e6))
    assert small > middle > large
    assert large < 0.02
    sizes = [len(share) for share in Dirichlet(alpha=1e6).split(np.arange(2000) % 5, 10, seed)]
    assert max(sizes) - min(sizes) <= 10  # two per class, by rounding


def test_dirichlet_shares_have_the_mean_and_variance_of_their_distribution():
    # the share of one device in one class is Beta(alpha, (n-1) alpha): n = 4, alpha = 1
    labels = np.zeros(4000, np.int64)
    sizes = np.array([len(Dirichlet(alpha=1.0).split(labels, 4, seed)[0]) for seed in range(400)])
    assert sizes.mean() / 4000 == pytest.approx(0.25, abs=0.03)
    assert sizes.var() / 4000**2 == pytest.approx(3 / 80, rel=0.25)


def test_every_device_has_exactly_k_classes():
    labels = np.repeat(np.arange(10), 100)
    shares = Shards(classes=2).split(labels, 20, 0)
    assert [len(np.unique(labels[share])) for share in shares] == [2] * 20
    assert [len(share) for share in shares] == [50] * 20
    pairs = {tuple(np.unique(labels[share])) for share in shares}
    assert len(pairs) > 10


def test_shards_of_unequal_classes_have_nearly_equal_sizes():
    labels = np.repeat(np.arange(3), [900, 300, 300])
    sizes = [len(share) for share in Shards(classes=1).split(labels, 5, 0)]
    assert sizes == [300] * 5


def test_impossible_shards_are_rejected():
    labels = np.repeat(np.arange(4), 10)
    with pytest.raises(ValueError, match="Expected at most 4 classes per device, got 5"):
        Shards(classes=5).split(labels, 8, 0)
    with pytest.raises(
        ValueError, match="Expected 4 to 12 shares for 4 classes, got 3 devices with 1"
    ):
        Shards(classes=1).split(labels, 3, 0)


def test_the_images_of_a_writer_stay_together():
    groups = np.array([7, 7, 3, 3, 3, 9])
    alone = ByGroup().split(np.zeros(6, np.int64), 3, 0, groups)
    assert sorted(share.tolist() for share in alone) == [[0, 1], [2, 3, 4], [5]]
    shared = ByGroup().split(np.zeros(6, np.int64), 2, 0, groups)
    assert sorted(share.tolist() for share in shared) == [[0, 1, 5], [2, 3, 4]]


def test_writers_must_be_known_and_as_many_as_devices():
    with pytest.raises(
        ValueError, match=r"images with groups \(their writers or users\), got none"
    ):
        ByGroup().split(np.zeros(6, np.int64), 3, 0)
    with pytest.raises(ValueError, match="Expected at most 2 devices, one per group, got 3"):
        ByGroup().split(np.zeros(6, np.int64), 3, 0, np.array([1, 1, 1, 2, 2, 2]))


def test_no_spread_is_equal_sizes_and_more_spread_is_more_unequal():
    labels = np.zeros(1000, np.int64)
    sizes = {
        spread: np.array(
            [len(share) for share in LogNormalSizes(spread=spread).split(labels, 10, 0)]
        )
        for spread in (0.0, 0.5, 2.0)
    }
    assert set(sizes[0.0]) == {100}
    assert sizes[0.5].std() < sizes[2.0].std()


def test_parts_are_as_close_to_the_weights_as_possible():
    assert apportion(10, np.array([1.0, 1.0, 1.0])).tolist() == [4, 3, 3]
    assert apportion(7, np.array([0.5, 0.25, 0.25])).tolist() == [3, 2, 2]


def test_a_summary_is_one_line():
    shares = (np.array([0, 1, 2]), np.array([3]))
    summary = summarise_shares(shares, np.array([0, 1, 2, 0]))
    assert summary == "2 devices with 1 to 3 images (median 2) of 1 to 3 classes (median 2)"


def test_a_partition_is_read_from_a_table():
    assert decode({"type": "dirichlet", "alpha": 0.1}, AnyPartition) == Dirichlet(alpha=0.1)
    assert decode({"type": "by_group"}, AnyPartition) == ByGroup()
    with pytest.raises(ValueError, match="alpha"):
        Dirichlet(alpha=0.0)
