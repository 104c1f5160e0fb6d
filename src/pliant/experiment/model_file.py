"""Model files: a trained network with its preprocessing and classes, for use without pliant.

`safetensors` has the weights, and how to prepare inputs in its metadata. The programs in `pt2`
(torch.export) and `onnx` prepare their inputs themselves: they take samples as the data set has
them, such as bytes from 0 to 255, in batches of any size, and return one score per class.
"""

import io
import warnings
import zipfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Literal

import msgspec
import safetensors
import torch
from msgspec import Struct
from safetensors.torch import save as encode_tensors
from torch import Tensor, nn

from pliant.data import ImageDataset
from pliant.extras import require
from pliant.params import Params
from pliant.storage import atomic, formats
from pliant.value import Numbers

ModelFormat = Literal["safetensors", "pt2", "onnx"]
METADATA_KEY, PT2_ENTRY = "pliant", "pliant.json"


class InputForm(Struct, frozen=True):
    """What a network takes: (sample - mean) / std per channel, or tokens as they are."""

    shape: tuple[int, ...]  # of one sample
    dtype: Literal["uint8", "float32", "int64"]  # of samples before they are prepared
    mean: tuple[float, ...]  # per channel, in the unit of the samples
    std: tuple[float, ...]


class ModelInfo(Struct, frozen=True):
    """What a model file says about its network."""

    network: str
    options: dict[str, Numbers]
    classes: tuple[str, ...]
    input: InputForm
    num_params: int
    rounds: int  # of training
    accuracy: float | None = None  # on the test images, after these rounds
    format: int = formats.MODEL.number
    program: str = ""  # one of `ModelFormat`; a reader fills it in


def describe_input(images: ImageDataset) -> InputForm:
    """Return the samples that a network trained on these images takes."""
    if images.group_statistics:
        raise ValueError(
            f"{images.name}: expected images that are normalised in one way, as a model file says "
            "how, got a normalisation per group"
        )
    unit = 255.0 if images.pixels.dtype == torch.uint8 else 1.0
    dtype: Literal["uint8", "float32", "int64"] = "float32"
    if images.pixels.dtype in (torch.uint8, torch.int64):
        dtype = "uint8" if images.pixels.dtype == torch.uint8 else "int64"
    mean, std = (tuple(value * unit for value in part) for part in (images.mean, images.std))
    return InputForm(images.shape, dtype, mean, std)


class PreparedNetwork(nn.Module):
    """A network in evaluation mode that prepares its inputs itself."""

    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, form: InputForm) -> None:
        super().__init__()
        self.net = deepcopy(net).eval()
        self.is_normalised = form.dtype != "int64"
        shape = (-1, *(1,) * (len(form.shape) - 1))
        self.register_buffer("mean", torch.tensor(form.mean).view(shape))
        self.register_buffer("std", torch.tensor(form.std).view(shape))
        self.eval()

    def forward(self, samples: Tensor) -> Tensor:
        if self.is_normalised:
            samples = (samples.to(torch.float32) - self.mean) / self.std
        scores: Tensor = self.net(samples)
        return scores


def write_model(
    path: Path, net: nn.Module, params: Params, info: ModelInfo, kind: ModelFormat
) -> None:
    """Write a network with these parameters; a file that is there is replaced when all is done."""
    net = deepcopy(net)
    net.load_state_dict(params, strict=False)  # tied tensors are there once
    prepared, text = PreparedNetwork(net, info.input), msgspec.json.encode(info).decode()
    encoders: dict[str, Callable[[], bytes]] = {
        "safetensors": lambda: _encode_safetensors(params, text),
        "pt2": lambda: _encode_pt2(prepared, info, text),
        "onnx": lambda: _encode_onnx(prepared, info, text),
    }
    atomic.write_bytes(path, encoders[kind]())


def _encode_safetensors(params: Params, text: str) -> bytes:
    tensors = {name: tensor.contiguous() for name, tensor in params.items()}
    raw: bytes = encode_tensors(tensors, {"format": "pt", METADATA_KEY: text})
    return raw


def _make_samples(info: ModelInfo, count: int = 2) -> Tensor:
    """Return samples to trace a network with; with one alone, the batch size would be fixed."""
    return torch.zeros(count, *info.input.shape, dtype=getattr(torch, info.input.dtype))


def _encode_pt2(prepared: PreparedNetwork, info: ModelInfo, text: str) -> bytes:
    batch = {"samples": {0: torch.export.Dim("batch")}}
    program = torch.export.export(prepared, (_make_samples(info),), dynamic_shapes=batch)
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={PT2_ENTRY: text})
    return buffer.getvalue()


def _encode_onnx(prepared: PreparedNetwork, info: ModelInfo, text: str) -> bytes:
    require("onnx", "export")
    require("onnxscript", "export")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about its own calls
        program = torch.onnx.export(
            prepared,
            (_make_samples(info),),
            dynamo=True,
            input_names=["samples"],
            output_names=["scores"],
            dynamic_shapes={"samples": {0: torch.export.Dim("batch")}},
            verbose=False,
        )
    if program is None:
        raise RuntimeError("torch.onnx.export returned no program")
    program.model.metadata_props[METADATA_KEY] = text
    raw: bytes = program.model_proto.SerializeToString()
    return raw


def read_model_info(path: Path) -> ModelInfo:
    """Read what a model file says about its network, without running anything in it."""
    kind = path.suffix.removeprefix(".")
    readers = {"safetensors": _read_safetensors, "pt2": _read_pt2, "onnx": _read_onnx}
    if kind not in readers:
        raise ValueError(f"{path}: expected a file named .safetensors, .pt2 or .onnx")
    with path.open("rb"):  # a missing file is an error of ours, with its path
        pass
    text = readers[kind](path)
    if text is None:
        raise ValueError(f"{path}: expected a file of `pliant model export`, found none of its own")
    try:
        formats.MODEL.check(msgspec.json.decode(text).get("format"), path)
        info = msgspec.json.decode(text, type=ModelInfo)
    except (msgspec.DecodeError, AttributeError) as error:
        raise ValueError(f"{path}: expected the description of a model, got {error}") from None
    return msgspec.structs.replace(info, program=kind)


def _read_safetensors(path: Path) -> str | None:
    try:
        with safetensors.safe_open(path, "pt") as file:
            return (file.metadata() or {}).get(METADATA_KEY)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: expected a safetensors file, got {error}") from None


def _read_pt2(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(f"extra/{PT2_ENTRY}")]
            return archive.read(names[0]).decode() if names else None
    except zipfile.BadZipFile:
        raise ValueError(f"{path}: expected a program of torch.export, got no archive") from None


def _read_onnx(path: Path) -> str | None:
    onnx = require("onnx", "export")
    try:
        model = onnx.load_model_from_string(path.read_bytes())
    except Exception as error:  # protobuf has several, and none in common
        reason = type(error).__name__
        raise ValueError(f"{path}: expected an ONNX model, got {reason} reading it") from None
    return {entry.key: entry.value for entry in model.metadata_props}.get(METADATA_KEY)
