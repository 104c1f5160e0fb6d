"""The Flower ClientApp of a device: it forwards requests to the worker and replies to the server.

Flower starts one process per message, so this file imports neither torch nor what does.
"""

import time
from multiprocessing.connection import Client
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from pliant.deploy.constants import ARRIVAL_HEADER
from pliant.deploy.flower.transport import extract_body, make_content

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
