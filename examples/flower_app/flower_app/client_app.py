"""The devices; each keeps its state in its own folder."""

import tempfile
from pathlib import Path

from pliant.deploy.flower.strategy import make_client_app

app = make_client_app(Path(tempfile.gettempdir()) / "flower_app")
