"""What methods build on: gradients without a step, values on shelves, corrections."""

import torch
from torch import nn

from pliant.nn.elastic import elastic
from pliant.nn.learner import Learner
from pliant.nn.optimiser import Sgd
from pliant.params import clone, params_of
from pliant.rng import stream


def made(optimiser=Sgd(lr=0.1, momentum=0.5)):  # noqa: B008 - a frozen value
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3)
        )
    flexible = elastic(net, torch.zeros(2, 1, 8, 8))
    return flexible, params_of(net), Learner(flexible, params_of(net), optimiser)


def mean_square(output):
    return output.square().mean()


def inputs(step=0):
    return torch.from_numpy(stream(1, step).standard_normal((4, 1, 8, 8), "float32"))


def same(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


def test_gradients_and_a_descent_are_a_step():
    (net, _, one), (_, _, two) = made(), made()
    for step in range(3):
        subnet = net.draw(0.5, stream(0, step))
        one.switch(subnet)
        two.switch(net.draw(0.5, stream(0, step)))
        loss = one.step(inputs(step), mean_square)
        value, grads = two.gradients(inputs(step), mean_square)
        two.descend(grads)
        assert torch.equal(loss, value)
    assert same(one.params(), two.params())


def test_gradients_alone_move_no_weight():
    net, start, learner = made()
    learner.switch(net.draw(0.5, stream(0)))
    learner.gradients(inputs(), mean_square)
    found = learner.params()
    assert all(torch.equal(found[name], start[name]) for name in net.trained)


def test_a_part_of_what_is_laid_is_what_the_subnet_takes():
    net, start, learner = made()
    subnet = net.draw(0.5, stream(0))
    learner.switch(subnet)
    values = {
        name: torch.rand_like(tensor) for name, tensor in start.items() if name in net.trained
    }
    part = learner.part(learner.laid(values))
    small = net.take(start | values, subnet)
    flat = torch.cat([small[name].reshape(-1) for name in values])
    assert torch.equal(torch.cat(part).sort().values, flat.sort().values)
    seen = []
    learner.step(
        inputs(), mean_square, correct=lambda g, p: seen.append(clone(dict(enumerate(p)))) or g
    )
    before = learner.part(learner.laid(start))
    assert all(torch.equal(seen[0][place], tensor) for place, tensor in enumerate(before))


def test_what_is_spread_has_zeros_elsewhere():
    net, start, learner = made()
    learner.switch(net.draw(0.5, stream(0)))
    laid = learner.laid(start)
    part = learner.part(laid)
    full = learner.spread(part)
    assert [flat.shape for flat in full] == [flat.shape for flat in laid]
    assert all(torch.equal(*pair) for pair in zip(learner.part(full), part, strict=True))
    assert sum(int(flat.count_nonzero()) for flat in full) <= sum(flat.numel() for flat in part)
    learner.switch(net.full)
    assert all(torch.equal(*pair) for pair in zip(learner.spread(laid), laid, strict=True))


def test_a_correction_is_added_to_the_gradient():
    net, start, learner = made(Sgd(lr=0.5))
    _, _, plain = made(Sgd(lr=0.5))
    subnet = net.draw(0.5, stream(0))
    learner.switch(subnet)
    plain.switch(subnet)
    learner.step(inputs(), mean_square, correct=lambda grads, _: [g + 1 for g in grads])
    plain.step(inputs(), mean_square)
    found, wanted = learner.params(), plain.params()
    _, kept = net.embed(start, net.take(start, subnet), subnet)
    for name in net.trained:
        torch.testing.assert_close(found[name], wanted[name] - 0.5 * kept[name])


def test_a_working_set_of_the_same_shapes_is_filled_anew():
    (net, _, one), (_, _, two) = made(), made()
    for step in range(6):
        subnet = net.draw(0.5, stream(0, step), "rounded")  # three of six filters, always
        one.switch(subnet)
        two.switch(net.full)  # of other shapes, so that nothing is left of the last working set
        two.switch(subnet)
        assert torch.equal(one.step(inputs(step), mean_square), two.step(inputs(step), mean_square))
    assert same(one.params(), two.params())
