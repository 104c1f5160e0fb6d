import numpy as np
import pytest
import torch

from pliant.data import image_folder

pillow = pytest.importorskip("PIL.Image")


def write_image(path, value, size=(4, 3), mode="L"):
    path.parent.mkdir(parents=True, exist_ok=True)
    colour = value if mode == "L" else (value, 0, 255)
    pillow.new(mode, size, colour).save(path)


@pytest.fixture
def pets(tmp_path):
    for name, base in (("cat", 10), ("dog", 20)):
        for number in range(5):
            write_image(tmp_path / "pets" / name / f"{number}.png", base + number)
    return tmp_path / "pets"


def test_the_class_is_the_index_of_the_sub_folder(pets):
    source = image_folder(pets)
    assert (len(source.train), len(source.test)) == (8, 2)
    for part in (source.train, source.test):
        assert torch.equal(part.labels, (part.pixels[:, 0, 0, 0] >= 20).long())
    values = torch.cat([source.train.pixels, source.test.pixels])[:, 0, 0, 0]
    assert sorted(values.tolist()) == [10, 11, 12, 13, 14, 20, 21, 22, 23, 24]
    assert source.train.shape == (1, 3, 4)
    assert source.train.name == "pets"


def test_the_seed_draws_the_test_part(pets):
    test_parts = {
        tuple(image_folder(pets, seed=seed).test.pixels[:, 0, 0, 0].tolist()) for seed in range(8)
    }
    assert len(test_parts) > 1
    assert torch.equal(
        image_folder(pets, seed=3).test.pixels, image_folder(pets, seed=3).test.pixels
    )


def test_train_and_test_folders_are_the_two_parts(tmp_path):
    write_image(tmp_path / "train" / "a" / "1.png", 1)
    write_image(tmp_path / "train" / "b" / "2.png", 3)
    write_image(tmp_path / "test" / "b" / "3.png", 5)
    source = image_folder(tmp_path)
    assert source.test.labels.tolist() == [1]
    assert source.test.mean == source.train.mean


def test_grey_images_become_colour_next_to_colour_images(pets):
    write_image(pets / "cat" / "9.png", 200, mode="RGB")
    source = image_folder(pets)
    assert source.train.shape == (3, 3, 4)
    corners = torch.cat([source.train.pixels, source.test.pixels])[:, :, 0, 0].tolist()
    assert [200, 0, 255] in corners
    assert [10, 10, 10] in corners


def test_images_of_different_sizes_are_rejected(pets):
    write_image(pets / "dog" / "9.png", 1, size=(5, 3))
    with pytest.raises(ValueError, match=r"9.png: expected 4x3 pixels as in 0.png, got 5x3"):
        image_folder(pets)


def test_an_empty_folder_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="expected one sub-folder per class, got none"):
        image_folder(tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(ValueError, match="expected image files in its sub-folders, got none"):
        image_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere: expected a folder"):
        image_folder(tmp_path / "nowhere")


def test_a_damaged_image_is_rejected(pets):
    noise = np.random.default_rng(0).integers(0, 256, (3, 4), np.uint8)
    path = pets / "dog" / "9.png"
    pillow.fromarray(noise).save(path)
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2 + 10])
    with pytest.raises(ValueError, match=r"9.png: expected a complete image file"):
        image_folder(pets)
    path.write_bytes(b"not an image")
    with pytest.raises(ValueError, match=r"9.png: expected an image file"):
        image_folder(pets)


def test_sixteen_bit_images_are_rejected(pets):
    pillow.fromarray(np.full((3, 4), 40_000, np.uint16)).save(pets / "dog" / "9.png")
    with pytest.raises(ValueError, match=r"9.png: expected 8 bits per channel, got mode I;16"):
        image_folder(pets)


def test_a_class_that_only_the_test_part_has_is_rejected(tmp_path):
    write_image(tmp_path / "train" / "a" / "1.png", 1)
    write_image(tmp_path / "test" / "b" / "3.png", 5)
    with pytest.raises(ValueError, match=r"test: expected the classes \['a'\], also got \['b'\]"):
        image_folder(tmp_path)
