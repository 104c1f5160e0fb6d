"""Variations of kept activations: shifts are those of the image, mixtures are convex."""

import msgspec
import torch
import torch.nn.functional as F
from tests.split.small_split import LOCAL, make_images, make_network, run

from pliant.rng import rng_stream
from pliant.split import OneShotSplit
from pliant.split.variation import vary_activations


def test_a_shift_of_feature_maps_is_a_shift_of_the_image_except_at_its_border():
    images = make_images(32)
    pixels = images.get_normalised(torch.arange(32))
    stage = make_network().stage1  # halves both sides
    with torch.no_grad():
        activations = stage(pixels)
        batch = activations, images.labels
        shifted, labels = vary_activations(batch, 3, rng_stream(0, "vary"), shift=1)
        assert torch.equal(labels, images.labels)
        moves = set()
        for image, (x, result) in enumerate(zip(pixels, shifted, strict=True)):
            found = [
                (down, right)
                for down in (-1, 0, 1)
                for right in (-1, 0, 1)
                if torch.allclose(
                    stage(torch.roll(x, (2 * down, 2 * right), (1, 2))[None])[0, :, 3:-3, 3:-3],
                    result[:, 3:-3, 3:-3],
                    atol=1e-6,
                )
            ]
            assert len(found) == 1, image
            moves.update(found)
    assert len(moves) == 9


def test_a_mixture_lies_between_two_activations_and_their_labels():
    activations, labels = torch.eye(6), torch.arange(6) % 3
    mixed, targets = vary_activations((activations, labels), 3, rng_stream(1, "vary"), mixup=0.4)
    assert torch.allclose(mixed.sum(dim=1), torch.ones(6))
    assert mixed.min() >= 0
    assert (mixed > 0).sum(dim=1).max() == 2  # an image and its partner
    assert torch.allclose(targets, mixed @ F.one_hot(labels, 3).float())


def test_clients_neither_send_nor_compute_more_for_variations():
    plain = OneShotSplit(local=LOCAL, local_share=0.25, passes=2, pooled=False)
    varied = msgspec.structs.replace(plain, shift=1, mixup=0.4)
    results = run(varied), run(plain)
    assert results[0][-1].digest != results[1][-1].digest
    for record, other in zip(*results, strict=True):
        for name in ("up", "down", "macs", "seconds", "samples"):
            assert getattr(record, name) == getattr(other, name), name
