"""What devices declare about the data that they keep: check it once, and hold them to it."""

import logging
from collections.abc import Iterable, Mapping
from itertools import pairwise

from pliant.data.declared import DataDeclaration, DeclaredData
from pliant.deploy.messages import TrainReply, decode_message
from pliant.engine.round_loop import Run

log = logging.getLogger("pliant")

MAX_REASON_CHARS = 300


class DeclarationReader:
    """Accept the first valid declaration of each device for the whole run."""

    def __init__(self, max_samples: int) -> None:
        self._max_samples = max_samples
        self._read: dict[int, bytes] = {}  # the last hello of each device
        self.problems: dict[int, str] = {}  # with the last hello of devices that are not accepted

    def read_hellos(self, run: Run, devices: Iterable[int], hellos: Mapping[int, bytes]) -> None:
        """Add the declarations in new hellos of these devices to the run."""
        data = run.context.data
        assert isinstance(data, DeclaredData)
        for device in devices:
            raw = hellos.get(device)
            if raw is None or device in data.declarations or raw is self._read.get(device):
                continue
            self._read[device] = raw
            self.problems.pop(device, None)
            try:
                data.declarations[device] = self._read_declaration(run, raw)
            except ValueError as error:
                self.problems[device] = f"device {device}: {error}"[:MAX_REASON_CHARS]
                log.warning("%s", self.problems[device])

    def _read_declaration(self, run: Run, raw: bytes) -> DataDeclaration:
        reply, _ = decode_message(raw, TrainReply)
        if reply.declaration is None and reply.reason:
            raise ValueError(reply.reason)
        declaration = check_declaration(
            reply.declaration, self._max_samples, run.context.data.train.classes
        )
        if declaration.classes is None and run.context.needs_classes:
            method = type(run.context.method).__name__
            raise ValueError(f"expected its classes, which {method} needs, got hidden ones")
        return declaration


def check_declaration(
    declaration: DataDeclaration | None, limit: int, num_classes: int
) -> DataDeclaration:
    """Return the declaration if it is possible, or raise."""
    if declaration is None:
        raise ValueError("expected a declaration of its data, found none")
    if not 1 <= declaration.max_samples <= limit:
        raise ValueError(
            f"expected 1 to {limit} samples (`max_samples` in [server]), "
            f"got {declaration.max_samples}"
        )
    if not 0 <= declaration.tests <= limit:
        raise ValueError(f"expected 0 to {limit} tests, got {declaration.tests}")
    classes = declaration.classes
    if classes is not None:
        is_rising = all(before < after for before, after in pairwise(classes))
        if not classes or not is_rising or not 0 <= classes[0] <= classes[-1] < num_classes:
            raise ValueError(f"expected rising classes from 0 to {num_classes - 1}, got others")
    return declaration
