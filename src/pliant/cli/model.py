"""`pliant model`: write the network of a run to a file, and describe such files."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cyclopts import App

if TYPE_CHECKING:
    from torch import nn

    from pliant.data import FederatedData
    from pliant.experiment.config import Experiment
    from pliant.experiment.model_file import ModelInfo

HELP = """\
Write the network of a run to a file for other programs, or describe such a file.

Example: pliant model export runs/digits --format onnx"""
app = App(name="model", help=HELP, help_format="plaintext")


@app.command
def export(
    run: Path,
    *,
    format: Literal["safetensors", "pt2", "onnx"] = "safetensors",
    out: Path | None = None,
) -> None:
    """Write the network of a run, with its preprocessing and classes, and print the file's path.

    Example: pliant model export runs/digits --format onnx

    Args:
        run: Folder of a federated run; its newest checkpoint is taken.
        format: Weights (safetensors), or a program for torch.export (pt2) or ONNX runtimes.
        out: File to write; by default RUN/model.FORMAT.
    """
    from pliant.experiment.config import load_run_config
    from pliant.experiment.export import export_run

    path = out or run / f"model.{format}"
    if path.suffix != f".{format}":
        raise ValueError(f"Expected --out to end in .{format}, as the format, got {path}")
    experiment = load_run_config(run)
    experiment.federated_method  # noqa: B018 - raises for a split run, which has no single network
    net, data = _build_inputs(run, experiment)
    export_run(run, path, format, experiment, net, data)
    sys.stdout.write(f"{path}\n")


@app.command
def info(file: Path, *, json: bool = False) -> None:
    """Describe a model file without running it.

    Example: pliant model info runs/digits/model.onnx

    Args:
        file: File written by `pliant model export`.
        json: Print one JSON object instead of a table.
    """
    from pliant.cli.progress import print_json, print_line
    from pliant.experiment.model_file import read_model_info

    model = read_model_info(file)
    if json:
        print_json(model)
        return
    for name, value in _list_facts(model):
        print_line(f"{name:<10}  {value}")


def _list_facts(model: "ModelInfo") -> list[tuple[str, str]]:
    options = "".join(f" {key}={value}" for key, value in model.options.items())
    shape, form = " x ".join(map(str, model.input.shape)), model.input
    facts = [
        ("format", model.program),
        ("network", model.network + options),
        ("parameters", f"{model.num_params:,}"),
        ("rounds", f"{model.rounds:,}"),
        ("accuracy", "not measured" if model.accuracy is None else f"{model.accuracy:.2%}"),
        ("input", f"samples of {shape}, {form.dtype}"),
    ]
    if form.mean:
        is_inside = model.program != "safetensors"
        who = "done by the program" if is_inside else "to be done by the caller"
        mean, std = (" ".join(f"{value:.6g}" for value in part) for part in (form.mean, form.std))
        facts.append(("prepare", f"(sample - mean) / std per channel, {who}"))
        facts += [("mean", mean), ("std", std)]
    return [*facts, ("classes", ", ".join(model.classes))]


def _build_inputs(run: Path, experiment: "Experiment") -> "tuple[nn.Module, FederatedData]":
    """Build the network and data of a run as its server had them."""
    import msgspec

    from pliant.deploy.messages import has_own_data
    from pliant.deploy.settings import SETTINGS_FILE, ServerSettings
    from pliant.experiment.build import build_experiment, build_network, load_server_data

    settings = run / SETTINGS_FILE  # only a run on real devices has it
    if settings.exists():
        pace = msgspec.json.decode(settings.read_bytes(), type=ServerSettings).pace
        if has_own_data(experiment, pace):
            data = load_server_data(experiment)
            return build_network(experiment.network, data, experiment.seed), data
    return build_experiment(experiment)
