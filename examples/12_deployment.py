"""Run a federation for real: a server and three devices as processes on this machine.

The same experiment runs on other machines with `pliant server` there and `pliant device` on each
device; see docs/deploy.md.
"""

import tempfile
from pathlib import Path

from pliant.cli import main

EXPERIMENT = """
rounds = 2
per_round = 3

[method]
type = "fedavg"

[fleet]
size = 3
round_seconds = 20.0

[data]
proxy = 7000
"""

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder, "digits.toml")
        spec.write_text(EXPERIMENT)
        # mutual TLS: the keys are made in the run's folder
        code = main(["deploy", "up", str(spec), "--out", str(Path(folder, "run"))])
        print("exit code", code)
