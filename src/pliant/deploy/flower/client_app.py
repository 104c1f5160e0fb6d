"""The content of Flower's messages, and the ClientApp that Flower's app bundle must name.

Devices run no app (see `node.py`), so this one answers nothing. Nothing here imports torch.
"""

from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.clientapp import ClientApp

BODY, TENSORS = "body", "tensors"

app = ClientApp()


def make_content(raw: bytes, *tensors: bytes, device: int | None = None) -> RecordDict:
    """Return the content of a message; a reply names its device.

    Flower stores arrays by their contents: tensors apart, which many messages have, only once.
    """
    arrays = {
        name: Array("uint8", (len(part),), "pliant.letter", part)
        for name, part in zip((BODY, TENSORS), (raw, *tensors), strict=False)
    }
    content = RecordDict({BODY: ArrayRecord(arrays)})
    if device is not None:
        content["device"] = ConfigRecord({"number": device})
    return content


def extract_body(message: Any) -> bytes:
    arrays = message.content[BODY]
    raw: bytes = arrays[BODY].data
    return raw + arrays[TENSORS].data if TENSORS in arrays else raw
