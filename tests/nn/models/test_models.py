import pytest
import torch
import torch.nn.functional as F
from torch import fx

from pliant.nn import models

names = pytest.mark.parametrize("name", models.MODELS)


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng():
        torch.manual_seed(5)
        yield


def make_images(name, batch):
    return torch.rand(batch, *models.INPUT_SHAPES[name])


def test_every_network_has_an_input_shape_and_is_exported():
    assert models.INPUT_SHAPES.keys() == models.MODELS.keys()
    for name, build in models.MODELS.items():
        assert getattr(models, name) is build
        assert build.__name__ == name


@names
def test_a_traced_network_gives_the_same_output(name):
    net = models.MODELS[name](classes=7).eval()
    x = make_images(name, 2)
    with torch.no_grad():
        y = net(x)
        assert (y.shape, y.dtype) == ((2, 7), torch.float32)
        assert torch.equal(fx.symbolic_trace(net)(x), y)


@names
def test_the_number_of_input_channels_can_be_chosen(name):
    _, height, width = models.INPUT_SHAPES[name]
    net = models.MODELS[name](classes=3, channels=2).to("meta")
    assert net.eval()(torch.empty(1, 2, height, width, device="meta")).shape == (1, 3)


@names
def test_gradients_reach_every_parameter(name):
    net = models.MODELS[name]().train()
    F.cross_entropy(net(make_images(name, 4)), torch.arange(4)).backward()
    unused = tuple(f"exits.{exit}." for exit in range(3))  # all but the last
    for path, parameter in net.named_parameters():
        if path.startswith(unused):
            continue
        assert parameter.grad is not None, path
        assert parameter.grad.isfinite().all(), path
        assert parameter.grad.any(), path


@names
def test_the_same_seed_gives_the_same_weights(name):
    def build(seed):
        torch.manual_seed(seed)
        return models.MODELS[name]().state_dict()

    first, again, other = build(1), build(1), build(2)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)
