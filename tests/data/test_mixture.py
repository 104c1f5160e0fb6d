import torch

from pliant.data import Images, Source, mixture
from pliant.data.mixture import mixed_cifar, mixed_noniid, noniid_client, to_colour_32


def source(name, classes, *, side=32, channels=3, each=20):
    """Return images whose pixels all hold their class number."""
    labels = torch.arange(classes).repeat(each)
    pixels = labels.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, channels, side, side).contiguous()
    whole = Images.from_tensors(pixels, labels, classes=classes, name=name)
    cut = len(labels) // 4
    rest = torch.arange(cut, len(labels))
    return Source(whole.subset(rest), whole.subset(torch.arange(cut)))


STATISTICS = ((0.5,) * 3, (0.25,) * 3)


def test_grey_images_are_padded_and_copied_to_three_channels():
    grey = torch.randint(1, 256, (2, 1, 28, 28), dtype=torch.uint8)
    colour = to_colour_32(grey)
    assert colour.shape == (2, 3, 32, 32)
    assert torch.equal(colour[:, 1, 2:30, 2:30], grey[:, 0])
    assert torch.equal(colour[:, 0], colour[:, 2])
    assert colour[:, :, :2].sum() + colour[:, :, 30:].sum() == 0
    assert torch.equal(to_colour_32(colour), colour)


def test_a_client_has_five_classes_in_three_parts_that_do_not_overlap():
    client = noniid_client(source("letters", 10, side=28, channels=1), STATISTICS, 0)
    assert (len(client.train), len(client.test), len(client.validation)) == (70, 20, 10)
    meaning: dict[int, set[int]] = {}
    for part in (client.train, client.test, client.validation):
        assert part.shape == (3, 32, 32)
        for label, value in zip(
            part.labels.tolist(), part.pixels[:, 0, 16, 16].tolist(), strict=True
        ):
            meaning.setdefault(label, set()).add(value)
    assert sorted(meaning) == [0, 1, 2, 3, 4]
    assert all(len(values) == 1 for values in meaning.values())  # one old class for each new label
    assert client.train.std == (0.25,) * 3


def test_the_split_is_fixed_by_the_seed():
    letters = source("letters", 10)
    one, same, other = (noniid_client(letters, STATISTICS, seed) for seed in (0, 0, 1))
    assert torch.equal(one.train.pixels, same.train.pixels)
    assert not torch.equal(one.train.pixels, other.train.pixels)


def test_mixed_noniid_has_five_kinds_of_image(monkeypatch):
    for name, classes in (("cifar100", 100), ("cifar10", 10)):
        monkeypatch.setattr(mixture, name, lambda root, n=name, c=classes: source(n, c))
    for name in ("fashion_mnist", "mnist", "notmnist"):
        monkeypatch.setattr(mixture, name, lambda root, n=name: source(n, 10, side=28, channels=1))
    found = mixed_noniid()
    names = [client.name for client in found.clients]
    assert names == ["cifar100", "cifar10", "fashion_mnist", "mnist", "notmnist"]
    assert found.classes == 5
    assert [len(client.train) for client in found.clients] == [70] * 5
    assert {client.train.shape for client in found.clients} == {(3, 32, 32)}
    # each kind is normalised by its own numbers
    assert len({client.train.mean for client in found.clients}) == 4


def test_mixed_cifar_gives_each_client_two_classes_under_their_own_labels(monkeypatch):
    monkeypatch.setattr(mixture, "cifar10", lambda root: source("cifar10", 10))
    found = mixed_cifar(seed=3)
    assert found.classes == 10
    held = []
    for client in found.clients:
        assert (len(client.train), len(client.test), len(client.validation)) == (36, 4, 0)
        both = torch.cat([client.train.labels, client.test.labels])
        assert torch.equal(
            both, torch.cat([client.train.pixels, client.test.pixels])[:, 0, 0, 0].long()
        )
        held += both.unique().tolist()
    assert sorted(held) == list(range(10))
