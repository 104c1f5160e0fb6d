import subprocess
import sys

import pytest
from test_ray_crew import cluster, pytestmark  # noqa: F401 - a fixture, and when to skip

SPEC = """
rounds = 4
per_round = 4

[method]
type = "distreal"
local = { batch = 10 }

[fleet]
size = 200
speed = { type = "changing" }

[rules]
late = "partial"
"""


@pytest.mark.slow  # two nodes and four imports of torch
def test_a_run_on_two_nodes_of_ray_has_the_records_of_inline(cluster, tmp_path):  # noqa: F811
    address, environment = cluster
    spec = tmp_path / "small.toml"
    spec.write_text(SPEC)
    found = []
    # a node has one CPU, so two workers are on two nodes
    for workers in ('type="inline"', f'type="ray",address="{address}",count=2'):
        folder = tmp_path / str(len(found))
        command = [sys.executable, "-m", "pliant", "run", spec, f"workers={{{workers}}}"]
        answer = subprocess.run(
            [*command, "--out", folder],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert answer.returncode == 0, answer.stderr
        found.append((folder / "events.jsonl").read_bytes())
    assert found[0] == found[1]
    assert b'"digest":"' in found[0]
