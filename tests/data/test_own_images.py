"""The images that a device or a server brings itself."""

import numpy as np
import pytest
import torch
from PIL import Image

from pliant.data import ImageDataset, TrainTestData
from pliant.data.formats.idx import encode_idx
from pliant.data.own_images import (
    ImageForm,
    read_own_images,
    split_by_content,
    wrap_own_images,
)

FORM = ImageForm((1, 2, 3), ("cat", "dog", "owl"), (0.5,), (2.0,))
PIXELS = torch.arange(12, dtype=torch.uint8).reshape(2, 1, 2, 3)
LABELS = torch.tensor([2, 0])


def write_npz(path, first=0, last=2):
    np.savez(path, images=PIXELS[first:last].numpy(), labels=LABELS[first:last].numpy())


def write_idx(folder):
    (folder / "my-images-idx3-ubyte").write_bytes(encode_idx(PIXELS[:, 0]))
    (folder / "my-labels-idx1-ubyte").write_bytes(encode_idx(LABELS.to(torch.uint8)))


def write_class_folders(folder):
    for index, name in ((0, "owl"), (1, "cat")):  # no dog: a device may lack classes
        (folder / name).mkdir()
        Image.fromarray(PIXELS[index, 0].numpy()).save(folder / name / "a.png")


def write_csv(folder):
    rows = [
        [*image.flatten().tolist(), label]
        for image, label in zip(PIXELS, LABELS.tolist(), strict=True)
    ]
    lines = ["a,b,c,d,e,f,label", *(",".join(map(str, row)) for row in rows)]
    (folder / "a.csv").write_text("\n".join(lines))


def write_two_npz(folder):
    write_npz(folder / "b.npz", 1, 2)
    write_npz(folder / "a.npz", 0, 1)


@pytest.mark.parametrize("write", [write_idx, write_class_folders, write_csv, write_two_npz])
def test_every_format_gives_the_same_images(tmp_path, write):
    write(tmp_path)
    images = read_own_images(tmp_path, FORM)
    assert images.test is None
    order = images.train.labels.argsort(descending=True)  # class folders come in class order
    assert images.train.pixels[order].tolist() == PIXELS.tolist()
    assert images.train.labels[order].tolist() == [2, 0]
    assert (images.train.classes, images.train.mean, images.train.std) == (3, (0.5,), (2.0,))


def test_a_single_file_is_enough(tmp_path):
    write_npz(tmp_path / "a.npz")
    assert len(read_own_images(tmp_path / "a.npz", FORM).train) == 2


def test_folders_train_and_test_are_the_two_parts(tmp_path):
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
    write_npz(tmp_path / "train" / "a.npz", 0, 1)
    write_npz(tmp_path / "test" / "a.npz", 1, 2)
    images = read_own_images(tmp_path, FORM)
    assert (images.train.labels.tolist(), images.test.labels.tolist()) == ([2], [0])


@pytest.mark.parametrize(
    ("write", "form", "message"),
    [
        (lambda folder: None, FORM, "found none"),
        (lambda folder: (write_csv(folder), write_idx(folder)), FORM, "found several kinds"),
        (write_csv, FORM._replace(shape=(1, 3, 3)), r"images of shape \(1, 3, 3\), got \(6,\)"),
        (write_idx, FORM._replace(shape=(1, 3, 2)), r"images \(1, 3, 2\), got \(1, 2, 3\)"),
        (write_csv, FORM._replace(names=("cat", "dog")), "labels from 0 to 1, got 2"),
        (write_class_folders, FORM._replace(names=("cat",)), r"also got \['owl'\]"),
    ],
)
def test_images_of_another_form_are_refused(tmp_path, write, form, message):
    write(tmp_path)
    with pytest.raises(ValueError, match=message):
        read_own_images(tmp_path, form)


def test_a_function_returns_images_in_one_or_two_parts():
    images = ImageDataset.from_tensors(PIXELS, LABELS)
    assert len(wrap_own_images(images, FORM, "f").train) == 2
    assert len(wrap_own_images(TrainTestData(images, images), FORM, "f").test) == 2
    with pytest.raises(ValueError, match=r"f: expected a pliant\.ImageDataset .* got list"):
        wrap_own_images([], FORM, "f")


def test_new_images_never_move_the_others_to_the_other_part():
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (1000, 1, 4, 4), np.uint8))
    images = ImageDataset.from_tensors(pixels, torch.arange(1000) % 3)
    all_parts = split_by_content(images, 0.25)
    some_parts = split_by_content(images.select(torch.arange(0, 1000, 2)), 0.25)
    assert len(all_parts.train) + len(all_parts.test) == 1000
    assert 200 < len(all_parts.test) < 300
    test_pixels = {image.numpy().tobytes() for image in all_parts.test.pixels}
    assert {image.numpy().tobytes() for image in some_parts.test.pixels} < test_pixels
    assert not test_pixels & {image.numpy().tobytes() for image in some_parts.train.pixels}
    assert len(split_by_content(images, 0.0).test) == 0
