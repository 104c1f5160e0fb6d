"""The parts that methods build on: gradients without a step, flat values, corrections."""

import torch
from torch import nn

from pliant.nn.elastic import elastic
from pliant.nn.optimisers import Sgd
from pliant.nn.trainer import SubnetTrainer
from pliant.params import clone, get_params
from pliant.rng import rng_stream


def make_trainer(optimiser=Sgd(lr=0.1, momentum=0.5)):  # noqa: B008 - a frozen value
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3)
        )
    flexible = elastic(net, torch.zeros(2, 1, 8, 8))
    return flexible, get_params(net), SubnetTrainer(flexible, get_params(net), optimiser)


def mean_square(output):
    return output.square().mean()


def make_inputs(step=0):
    return torch.from_numpy(rng_stream(1, step).standard_normal((4, 1, 8, 8), "float32"))


def are_equal(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


def test_computing_and_applying_gradients_equals_a_step():
    (net, _, left), (_, _, right) = make_trainer(), make_trainer()
    for step in range(3):
        subnet = net.draw(0.5, rng_stream(0, step))
        left.switch(subnet)
        right.switch(net.draw(0.5, rng_stream(0, step)))
        loss = left.step(make_inputs(step), mean_square)
        value, grads = right.compute_gradients(make_inputs(step), mean_square)
        right.apply_gradients(grads)
        assert torch.equal(loss, value)
    assert are_equal(left.params(), right.params())


def test_computing_gradients_moves_no_weight():
    net, start, trainer = make_trainer()
    trainer.switch(net.draw(0.5, rng_stream(0)))
    trainer.compute_gradients(make_inputs(), mean_square)
    after = trainer.params()
    assert all(torch.equal(after[name], start[name]) for name in net.trainable_names)


def test_gathered_flat_values_are_those_of_the_subnet():
    net, start, trainer = make_trainer()
    subnet = net.draw(0.5, rng_stream(0))
    trainer.switch(subnet)
    values = {
        name: torch.rand_like(tensor)
        for name, tensor in start.items()
        if name in net.trainable_names
    }
    gathered = trainer.gather_subnet(trainer.flatten_params(values))
    small = net.take(start | values, subnet)
    flat = torch.cat([small[name].reshape(-1) for name in values])
    assert torch.equal(torch.cat(gathered).sort().values, flat.sort().values)
    param_copies = []
    trainer.step(
        make_inputs(),
        mean_square,
        correction=lambda g, p: param_copies.append(clone(dict(enumerate(p)))) or g,
    )
    before = trainer.gather_subnet(trainer.flatten_params(start))
    assert all(torch.equal(param_copies[0][index], tensor) for index, tensor in enumerate(before))


def test_scattered_values_have_zeros_elsewhere():
    net, start, trainer = make_trainer()
    trainer.switch(net.draw(0.5, rng_stream(0)))
    flats = trainer.flatten_params(start)
    gathered = trainer.gather_subnet(flats)
    scattered = trainer.scatter_subnet(gathered)
    assert [flat.shape for flat in scattered] == [flat.shape for flat in flats]
    assert all(
        torch.equal(*pair) for pair in zip(trainer.gather_subnet(scattered), gathered, strict=True)
    )
    assert sum(int(flat.count_nonzero()) for flat in scattered) <= sum(
        flat.numel() for flat in gathered
    )
    trainer.switch(net.full)
    assert all(
        torch.equal(*pair) for pair in zip(trainer.scatter_subnet(flats), flats, strict=True)
    )


def test_a_correction_is_added_to_the_gradient():
    net, start, trainer = make_trainer(Sgd(lr=0.5))
    _, _, plain = make_trainer(Sgd(lr=0.5))
    subnet = net.draw(0.5, rng_stream(0))
    trainer.switch(subnet)
    plain.switch(subnet)
    trainer.step(make_inputs(), mean_square, correction=lambda grads, _: [g + 1 for g in grads])
    plain.step(make_inputs(), mean_square)
    corrected, uncorrected = trainer.params(), plain.params()
    _, is_kept = net.embed(start, net.take(start, subnet), subnet)
    for name in net.trainable_names:
        torch.testing.assert_close(corrected[name], uncorrected[name] - 0.5 * is_kept[name])


def test_a_working_set_of_the_same_shapes_is_refilled():
    (net, _, left), (_, _, right) = make_trainer(), make_trainer()
    for step in range(6):
        subnet = net.draw(0.5, rng_stream(0, step), "rounded")  # always three of six filters
        left.switch(subnet)
        right.switch(net.full)  # other shapes, so a new working set is allocated
        right.switch(subnet)
        assert torch.equal(
            left.step(make_inputs(step), mean_square), right.step(make_inputs(step), mean_square)
        )
    assert are_equal(left.params(), right.params())
