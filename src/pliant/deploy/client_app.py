"""The Flower ClientApp of a device: it hands each letter to the worker and back.

Flower starts a process for each message, so this file imports neither torch nor the rest of pliant.
"""

import struct
import time
from multiprocessing.connection import Client
from pathlib import Path

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

BODY = "body"
CAME = struct.Struct("<d")  # before a letter: when it came
PATIENCE = 30.0  # seconds in which a worker that has died is there again

app = ClientApp()


@app.train()  # type: ignore[untyped-decorator] # Flower's stubs are not read
def train(message: Message, context: Context) -> Message:
    """Answer one order."""
    asked = message.content[BODY][BODY].data
    raw = _asked(str(context.node_config["socket"]), asked)
    array = Array("uint8", (len(raw),), "pliant.letter", raw)
    number = ConfigRecord({"number": int(context.node_config["device"])})
    content = RecordDict({BODY: ArrayRecord({BODY: array}), "device": number})
    return Message(content, reply_to=message)


def _asked(socket: str, letter: bytes) -> bytes:
    began = time.monotonic()
    while True:
        try:
            link = Client(socket, family="AF_UNIX")
            break
        except OSError:
            if time.monotonic() > began + PATIENCE:
                raise
            Path(f"{socket}.wanted").touch()  # the worker may have left because it was idle
            time.sleep(0.2)
    with link:
        link.send_bytes(CAME.pack(began) + letter)  # this clock is the whole machine's
        return link.recv_bytes()
