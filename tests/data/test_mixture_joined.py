import numpy as np
import torch

from pliant.data import Client, Images, Mixture, batches
from pliant.data.mixture import federated


def part(count, bright, mean, std):
    pixels = torch.full((count, 1, 2, 2), bright, dtype=torch.uint8)
    return Images(pixels, torch.arange(count) % 2, 2, (mean,), (std,), name="part")


def mixture():
    clients = []
    for number, (mean, std) in enumerate([(0.0, 1.0), (0.5, 0.25)]):
        sizes = (6, 4, 1)
        parts = [part(size, 51 * (number + 1), mean, std) for size in sizes]
        clients.append(Client(f"client {number}", *parts))
    return Mixture("toy", tuple(clients), classes=2)


def test_each_client_keeps_its_images_and_its_statistics():
    data = federated(mixture())
    assert data.sizes() == (6, 6)
    assert [len(data.test_of(client)) for client in (0, 1)] == [4, 4]
    assert len(data.proxy) == 2
    first, second = (data.train.normalised(share) for share in data.devices)
    assert torch.allclose(first, torch.tensor(0.2))  # 51 / 255
    assert torch.allclose(second, torch.tensor((0.4 - 0.5) / 0.25))


def test_batches_are_normalised_by_their_own_client():
    data = federated(mixture())
    (x, _), *_ = batches(data.train, data.devices[1], 3, 0, 0, 1, 0)
    assert torch.allclose(x, torch.tensor(-0.4), atol=1e-6)


def test_fewer_images_are_drawn_by_the_seed():
    data = federated(mixture(), samples=3, tests=2, seed=4)
    assert data.sizes() == (3, 3)
    assert [share.tolist() for share in data.tests] == [[0, 1], [2, 3]]
    again = federated(mixture(), samples=3, tests=2, seed=4)
    assert torch.equal(data.train.labels, again.train.labels)


def test_data_without_tests_of_its_own_gives_all():
    data = federated(mixture())
    plain = type(data)(data.train, data.test, data.proxy, data.devices, data.proxy_indices)
    assert np.array_equal(plain.test_of(1), np.arange(8))
