"""A model file gives, without pliant, the scores of the network that was trained."""

import json

import msgspec
import pytest
import torch
from safetensors.torch import load_file, safe_open

import pliant as pl
from pliant.experiment.model_file import (
    InputForm,
    ModelInfo,
    describe_input,
    read_model_info,
    write_model,
)

# programs that take long to write
SLOW_PT2 = ("mobilenet_v2",)
SLOW_ONNX = ("digits_cnn", "lenet_small", "mobilenet_v2", "resnet20", "vit_small")
BYTES = torch.Generator().manual_seed(1)
# name, options and the samples of the data set
NETWORKS = {
    "digits_cnn": ({}, (1, 28, 28)),
    "digits_cnn_bn": ({"filters": (3, 5)}, (1, 28, 28)),
    "resnet20": ({"classes": 7}, (3, 32, 32)),
    "mobilenet_v2": ({"width": 0.25}, (3, 32, 32)),
    "vit_small": ({}, (3, 32, 32)),
    "lenet_small": ({}, (3, 32, 32)),
}


def mark_slow(names):
    """Return all networks, those with these names as slow."""
    return [
        pytest.param(name, marks=pytest.mark.slow) if name in names else name for name in NETWORKS
    ]


def make_images(shape, count=3):
    pixels = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=BYTES)
    labels = torch.arange(count) % 2
    mean, std = tuple(0.1 * c + 0.3 for c in range(shape[0])), (0.25,) * shape[0]
    return pl.ImageDataset(pixels, labels, 10, mean, std)


def build(name):
    """Return a network with trained-looking weights and statistics, images and its scores."""
    options, shape = NETWORKS[name]
    torch.manual_seed(0)
    net, images = getattr(pl.models, name)(**options), make_images(shape)
    net.train()(images.get_normalised())  # so that norm statistics are not those of the start
    net.eval()
    with torch.no_grad():
        return net, options, images, net(images.get_normalised())


def write(path, net, options, images, name):
    names = tuple(map(str, range(10)))
    num_params = sum(tensor.numel() for tensor in net.parameters())
    info = ModelInfo(name, options, names, describe_input(images), num_params, 4, 0.5)
    write_model(path, net, pl.get_params(net), info, path.suffix[1:])
    return info


@pytest.mark.parametrize("name", mark_slow(SLOW_PT2))
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch|copyreg")  # of torch's own modules
def test_a_torch_program_scores_bytes_like_the_network(name, tmp_path):
    net, options, images, expected = build(name)
    info = write(tmp_path / "model.pt2", net, options, images, name)
    program = torch.export.load(tmp_path / "model.pt2").module()
    with torch.no_grad():
        torch.testing.assert_close(program(images.pixels), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(program(images.pixels[:1]), expected[:1], rtol=1e-4, atol=1e-4)
    assert read_model_info(tmp_path / "model.pt2") == msgspec.structs.replace(info, program="pt2")


@pytest.mark.parametrize("name", mark_slow(SLOW_ONNX))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a user sees none of them
def test_an_onnx_program_scores_bytes_like_the_network(name, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    net, options, images, expected = build(name)
    info = write(tmp_path / "model.onnx", net, options, images, name)
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for count in (3, 1):
        [scores] = session.run(["scores"], {"samples": images.pixels[:count].numpy()})
        torch.testing.assert_close(torch.from_numpy(scores), expected[:count], rtol=1e-3, atol=1e-4)
    found = session.get_modelmeta().custom_metadata_map["pliant"]
    assert json.loads(found)["classes"] == list(info.classes)
    assert read_model_info(tmp_path / "model.onnx") == msgspec.structs.replace(info, program="onnx")


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_and_metadata_are_all_that_plain_torch_needs(name, tmp_path):
    net, options, images, expected = build(name)
    write(tmp_path / "model.safetensors", net, options, images, name)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        form = json.loads(file.metadata()["pliant"])["input"]
    fresh = getattr(pl.models, name)(**options).eval()
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
    mean, std = (torch.tensor(form[key]).view(-1, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        scores = fresh((images.pixels.float() - mean) / std)
    torch.testing.assert_close(scores, expected)
    assert (form["dtype"], tuple(form["shape"])) == ("uint8", NETWORKS[name][1])


def test_tokens_reach_the_network_as_they_are(tmp_path):
    torch.manual_seed(0)
    net = pl.models.text_transformer(classes=3, length=6, vocabulary=9).eval()
    tokens = pl.ImageDataset.from_tensors(torch.arange(12).view(2, 6) % 9, torch.tensor([0, 1]))
    info = ModelInfo("text", {}, ("a", "b", "c"), describe_input(tokens), 1, 1)
    assert info.input == InputForm((6,), "int64", (), ())
    write_model(tmp_path / "model.pt2", net, pl.get_params(net), info, "pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    with torch.no_grad():
        torch.testing.assert_close(program(tokens.pixels), net(tokens.pixels))


def test_images_normalised_per_group_are_refused():
    images = pl.ImageDataset(
        torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.zeros(2).long(), 1, (0.0,), (1.0,),
        groups=torch.tensor([0, 1]), group_statistics=(((0.0,), (1.0,)), ((0.5,), (1.0,))),
    )  # fmt: skip
    with pytest.raises(ValueError, match="got a normalisation per group"):
        describe_input(images)


@pytest.mark.parametrize(
    ("name", "raw", "problem"),
    [
        ("model.bin", b"", "expected a file named .safetensors, .pt2 or .onnx"),
        ("model.safetensors", b"xx", "expected a safetensors file"),
        ("model.pt2", b"xx", "expected a program of torch.export, got no archive"),
    ],
)
def test_other_files_are_refused_in_one_line(name, raw, problem, tmp_path):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ValueError, match=problem):
        read_model_info(tmp_path / name)


def test_weights_of_other_programs_are_not_described(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="expected a file of `pliant model export`"):
        read_model_info(tmp_path / "model.safetensors")
