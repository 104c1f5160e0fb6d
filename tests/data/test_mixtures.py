import numpy as np
import torch

from pliant.data import (
    ClientData,
    FederatedData,
    ImageDataset,
    Mixture,
    TrainTestData,
    make_batches,
    mixtures,
)
from pliant.data.mixtures import (
    convert_to_rgb32,
    join_clients,
    make_noniid_client,
    mixed_cifar,
    mixed_noniid,
)


def make_source(name, classes, *, side=32, channels=3, per_class=20):
    """Return images whose pixels all hold their class number."""
    labels = torch.arange(classes).repeat(per_class)
    pixels = labels.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, channels, side, side).contiguous()
    images = ImageDataset.from_tensors(pixels, labels, classes=classes, name=name)
    cut = len(labels) // 4
    rest = torch.arange(cut, len(labels))
    return TrainTestData(images.select(rest), images.select(torch.arange(cut)))


STATISTICS = ((0.5,) * 3, (0.25,) * 3)


def test_grey_images_are_padded_and_copied_to_three_channels():
    grey = torch.randint(1, 256, (2, 1, 28, 28), dtype=torch.uint8)
    colour = convert_to_rgb32(grey)
    assert colour.shape == (2, 3, 32, 32)
    assert torch.equal(colour[:, 1, 2:30, 2:30], grey[:, 0])
    assert torch.equal(colour[:, 0], colour[:, 2])
    assert colour[:, :, :2].sum() + colour[:, :, 30:].sum() == 0
    assert torch.equal(convert_to_rgb32(colour), colour)


def test_a_client_has_five_classes_in_three_parts_that_do_not_overlap():
    client = make_noniid_client(make_source("letters", 10, side=28, channels=1), STATISTICS, 0)
    assert (len(client.train), len(client.test), len(client.validation)) == (70, 20, 10)
    old_classes: dict[int, set[int]] = {}
    for part in (client.train, client.test, client.validation):
        assert part.shape == (3, 32, 32)
        for label, value in zip(
            part.labels.tolist(), part.pixels[:, 0, 16, 16].tolist(), strict=True
        ):
            old_classes.setdefault(label, set()).add(value)
    assert sorted(old_classes) == [0, 1, 2, 3, 4]
    assert all(len(values) == 1 for values in old_classes.values())  # one per new label
    assert client.train.std == (0.25,) * 3


def test_the_split_is_fixed_by_the_seed():
    letters = make_source("letters", 10)
    client, same, other = (make_noniid_client(letters, STATISTICS, seed) for seed in (0, 0, 1))
    assert torch.equal(client.train.pixels, same.train.pixels)
    assert not torch.equal(client.train.pixels, other.train.pixels)


def test_mixed_noniid_has_five_sources(monkeypatch):
    def load_small(name, root):
        size = {"side": 28, "channels": 1} if name.endswith("mnist") else {}
        return make_source(name, 100 if name == "cifar100" else 10, **size)

    monkeypatch.setattr(mixtures, "load_dataset", load_small)
    mixture = mixed_noniid()
    names = [client.name for client in mixture.clients]
    assert names == ["cifar100", "cifar10", "fashion_mnist", "mnist", "notmnist"]
    assert mixture.classes == 5
    assert [len(client.train) for client in mixture.clients] == [70] * 5
    assert {client.train.shape for client in mixture.clients} == {(3, 32, 32)}
    # each source has its own statistics; the two CIFARs share theirs
    assert len({client.train.mean for client in mixture.clients}) == 4


def test_mixed_cifar_gives_each_client_two_classes_with_their_own_labels(monkeypatch):
    monkeypatch.setattr(mixtures, "load_dataset", lambda name, root: make_source(name, 10))
    mixture = mixed_cifar(seed=3)
    assert mixture.classes == 10
    classes = []
    for client in mixture.clients:
        assert (len(client.train), len(client.test), len(client.validation)) == (36, 4, 0)
        labels = torch.cat([client.train.labels, client.test.labels])
        pixels = torch.cat([client.train.pixels, client.test.pixels])
        assert torch.equal(labels, pixels[:, 0, 0, 0].long())
        classes += labels.unique().tolist()
    assert sorted(classes) == list(range(10))


def make_part(count, brightness, mean, std):
    pixels = torch.full((count, 1, 2, 2), brightness, dtype=torch.uint8)
    return ImageDataset(pixels, torch.arange(count) % 2, 2, (mean,), (std,), name="part")


def make_mixture():
    clients = []
    for number, (mean, std) in enumerate([(0.0, 1.0), (0.5, 0.25)]):
        parts = [make_part(size, 51 * (number + 1), mean, std) for size in (6, 4, 1)]
        clients.append(ClientData(f"client {number}", *parts))
    return Mixture("toy", tuple(clients), classes=2)


def test_each_client_keeps_its_images_and_its_statistics():
    data = join_clients(make_mixture())
    assert data.sizes() == (6, 6)
    assert [len(data.get_test_indices(client)) for client in (0, 1)] == [4, 4]
    assert len(data.proxy) == 2
    first, second = (data.train.get_normalised(share) for share in data.shares)
    assert torch.allclose(first, torch.tensor(0.2))  # 51 / 255
    assert torch.allclose(second, torch.tensor((0.4 - 0.5) / 0.25))


def test_batches_are_normalised_by_their_client_statistics():
    data = join_clients(make_mixture())
    (x, _), *_ = make_batches(data.train, data.shares[1], 3, 0, 0, 1, 0)
    assert torch.allclose(x, torch.tensor(-0.4), atol=1e-6)


def test_fewer_images_are_drawn_by_the_seed():
    data = join_clients(make_mixture(), max_samples=3, max_tests=2, seed=4)
    assert data.sizes() == (3, 3)
    assert [share.tolist() for share in data.test_shares] == [[0, 1], [2, 3]]
    again = join_clients(make_mixture(), max_samples=3, max_tests=2, seed=4)
    assert torch.equal(data.train.labels, again.train.labels)


def test_devices_without_their_own_test_images_share_all():
    data = join_clients(make_mixture())
    shared = FederatedData(data.train, data.test, data.proxy, data.shares, data.proxy_indices)
    assert np.array_equal(shared.get_test_indices(1), np.arange(8))
