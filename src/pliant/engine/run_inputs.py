"""What a run was started with: only the same method, network, data and settings resume it."""

from pathlib import Path
from typing import Any

import msgspec

from pliant.data import FederatedData
from pliant.devices import Fleet
from pliant.engine.round_loop import RunSettings
from pliant.engine.run_store import CHECKPOINTS
from pliant.storage import run_dir
from pliant.value import describe_difference, encode


def describe_method(method: Any) -> dict[str, Any]:
    """Return the type of a method and, if it is plain data, its fields."""
    plain = {"type": type(method).__name__, "local": encode(method.local)}
    try:
        fields: dict[str, Any] = encode(method)
    except TypeError:  # not a `Value`, nor any other kind of plain data
        return plain
    return plain | fields


def describe_inputs(
    method: Any, network: str, data: FederatedData, fleet: Fleet, settings: RunSettings
) -> dict[str, Any]:
    """Return what the result of a run depends on; `network` is a fingerprint.

    Initial weights are left out, since a checkpoint replaces them.
    """
    return {
        "method": describe_method(method),
        "network": network,
        "data": data.compute_digests(),
        "fleet": encode(fleet),
        "settings": encode(settings),
    }


def check_inputs(folder: Path, inputs: dict[str, Any], *, rounds_dependency: str | None) -> None:
    """Refuse to resume a run with other inputs; store those of a new run.

    A run may get more rounds, unless `rounds_dependency` names what depends on their number.
    """
    new = msgspec.json.decode(msgspec.json.encode(inputs), type=dict[str, Any])
    old = run_dir.read_inputs(folder)
    if old is None:
        if any((folder / CHECKPOINTS).glob("*.ckpt")):
            raise ValueError(
                f"{folder}: expected {run_dir.INPUTS_FILE} beside the checkpoints, found none; "
                "run the experiment again in a new folder"
            )
        run_dir.write_inputs(folder, new)
        return
    # settings that are newer than the run have their defaults
    old["settings"] = encode(RunSettings()) | old["settings"]
    old_rounds, new_rounds = old["settings"]["rounds"], new["settings"]["rounds"]
    old["settings"]["rounds"] = new_rounds
    if difference := describe_difference(old, new):
        raise ValueError(f"{folder} holds a run with {difference}: choose another folder")
    if old_rounds == new_rounds:
        return
    if new_rounds < old_rounds or rounds_dependency:
        reason = rounds_dependency or "a run can only become longer"
        raise ValueError(
            f"{folder} holds a run with rounds = {old_rounds}, not {new_rounds}: {reason}"
        )
    run_dir.set_rounds(folder, new_rounds)  # first, so that a kill in between can be repeated
    run_dir.write_inputs(folder, new)
