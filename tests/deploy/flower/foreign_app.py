"""An app of Flower that is not pliant's, and how to submit it."""

import subprocess

from tests.waiting import LIMIT

from pliant.deploy.supervise.child_process import make_process_env

PROJECT = """\
[project]
name = "foreign"
version = "1.0.0"
description = "Foreign code."
license = "Apache-2.0"

[tool.flwr.app]
publisher = "stranger"

[tool.flwr.app.components]
serverapp = "foreign:server"
clientapp = "foreign:client"

[tool.flwr.app.config]
folder = ""
"""
CODE = """\
import time
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()

@server.main()
def main(grid, context):
    folder = Path(context.run_config["folder"])
    (folder / "ran-on-server").touch()
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.1)
    message = Message(RecordDict(), dst_node_id=nodes[0], message_type="train")
    (reply,) = grid.send_and_receive([message])
    (folder / "answer").write_text(str(reply.error.reason if reply.has_error() else "done"))

@client.train()
def train(message, context):
    (Path(context.run_config["folder"]) / "ran-on-device").touch()
    return Message(RecordDict(), reply_to=message)
"""


def start_foreign_app(folder, address, security):
    """Submit an app with `flwr run`, as any user of the machine can; return the result."""
    app, home = folder / "app", folder / "home"
    for path in (app, home):
        path.mkdir()
    (app / "pyproject.toml").write_text(PROJECT)
    (app / "foreign.py").write_text(CODE)
    config = f'[superlink]\ndefault = "server"\n\n[superlink.server]\naddress = "{address}"\n'
    (home / "config.toml").write_text(config + security + "\n")
    return subprocess.run(
        ["flwr", "run", str(app), "server", "--run-config", f'folder="{folder}"'],
        env=make_process_env(home),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
