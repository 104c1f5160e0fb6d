"""The Flower ClientApp of a device: it forwards requests to the worker and replies to the server.

Flower starts one process per message, so this file imports neither torch nor what does.
"""

import time
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from pliant.deploy.settings import ARRIVAL_HEADER

BODY = "body"
CONNECT_SECONDS = 120.0  # a dead worker must be back by then, on a busy machine too

app = ClientApp()


@app.train()  # type: ignore[untyped-decorator] # Flower's stubs are not read
def train(message: Message, context: Context) -> Message:
    raw = _call_worker(str(context.node_config["socket"]), extract_body(message))
    return Message(make_content(raw, int(context.node_config["device"])), reply_to=message)


def _call_worker(socket: str, request: bytes) -> bytes:
    arrived_at = time.monotonic()
    while True:
        try:
            connection = Client(socket, family="AF_UNIX")
            break
        except OSError:
            if time.monotonic() > arrived_at + CONNECT_SECONDS:
                raise
            Path(f"{socket}.wanted").touch()  # the worker may have exited while idle
            time.sleep(0.2)
    with connection:
        # the monotonic clock is the same in all processes of a machine
        connection.send_bytes(ARRIVAL_HEADER.pack(arrived_at) + request)
        return connection.recv_bytes()


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
