"""The content of Flower's messages, and the ClientApp that Flower's app bundle must name.

Devices run no app (see `node.py`), so this one answers nothing. Nothing here imports torch.
"""

from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.clientapp import ClientApp

BODY = "body"

app = ClientApp()


def make_content(raw: bytes, device: int | None = None) -> RecordDict:
    """Return the content of a message; a reply names its device."""
    array = Array("uint8", (len(raw),), "pliant.letter", raw)
    content = RecordDict({BODY: ArrayRecord({BODY: array})})
    if device is not None:
        content["device"] = ConfigRecord({"number": device})
    return content


def extract_body(message: Any) -> bytes:
    raw: bytes = message.content[BODY][BODY].data
    return raw
