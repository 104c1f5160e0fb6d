"""The one Flower app that a pliant server runs, and the only one that its devices answer.

Flower distributes apps as bundles of code. This one holds no code, only the names of pliant's own
modules, and its bytes are the same in every run: server and devices refuse any other bundle.
"""

import zipfile
from hashlib import sha256
from io import BytesIO

_PROJECT = b"""\
[project]
name = "pliant-app"
version = "1.0.0"
description = "Rounds of pliant."
license = "Apache-2.0"

[tool.flwr.app]
publisher = "pliant"

[tool.flwr.app.components]
serverapp = "pliant.deploy.flower.server_app:app"
clientapp = "pliant.deploy.flower.client_app:app"

[tool.flwr.app.config]
folder = ""
"""
_DATE = (1980, 1, 1, 0, 0, 0)  # of every file, as bundles must not depend on when they are made


def build_app_bundle() -> bytes:
    """Return the bundle, whose bytes depend on this file only."""
    manifest = f"pyproject.toml,{sha256(_PROJECT).hexdigest()},{8 * len(_PROJECT)}".encode()
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as bundle:
        for name, raw in (("pyproject.toml", _PROJECT), (".info/CONTENT", manifest)):
            bundle.writestr(zipfile.ZipInfo(name, _DATE), raw)
    return buffer.getvalue()


APP_HASH = sha256(build_app_bundle()).hexdigest()
