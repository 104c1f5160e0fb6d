import subprocess
import sys

import pytest
from test_ray_crew import cluster, pytestmark  # noqa: F401 - a fixture, and when to skip

SPEC = """
[data]
proxy = 200
[search]
by = { type = "fast", least = 6, rounds = 1, refined = 3, vectors = 3 }
normalisers = 2
fresh = 2
rows = 4
[search.objective]
batches = 2
batch = 8
seeds = 1
snapshot_batches = 2
evaluated = 40
"""


@pytest.mark.slow  # two nodes and four imports of torch
def test_a_search_on_two_nodes_of_ray_has_the_files_of_inline(cluster, tmp_path):  # noqa: F811
    address, environment = cluster
    spec = tmp_path / "small.toml"
    spec.write_text(SPEC)
    found = []
    # a node has one CPU, so two workers are on two nodes
    for workers in ('type="inline"', f'type="ray",address="{address}",count=2'):
        folder = tmp_path / str(len(found))
        command = [sys.executable, "-m", "pliant", "search", spec, f"workers={{{workers}}}"]
        answer = subprocess.run(
            [*command, "--out", folder, "--no-pictures"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert answer.returncode == 0, answer.stderr
        names = ("trials.jsonl", "snapshot.ckpt", "table.safetensors")
        found.append([(folder / name).read_bytes() for name in names])
    assert found[0] == found[1]
