"""The devices: what they keep is in a folder for each of them."""

import tempfile
from pathlib import Path

from pliant.deploy.flower import client_app

app = client_app(Path(tempfile.gettempdir()) / "flower_app")
