import subprocess
import sys

import pytest
from test_ray_crew import cluster, pytestmark  # noqa: F401 - a fixture, and when to skip

RUN = """
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
SEARCH = """
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
@pytest.mark.parametrize(
    ("words", "text", "files"),
    [
        (["run"], RUN, ["events.jsonl"]),
        (["search", "--no-pictures"], SEARCH, ["trials.jsonl", "table.safetensors"]),
    ],
    ids=["run", "search"],
)
def test_two_nodes_of_ray_write_the_files_of_inline(cluster, words, text, files, tmp_path):  # noqa: F811
    address, environment = cluster
    spec = tmp_path / "small.toml"
    spec.write_text(text)
    found = []
    # a node has one CPU, so two workers are on two nodes
    for workers in ('type="inline"', f'type="ray",address="{address}",count=2'):
        folder = tmp_path / str(len(found))
        command = [sys.executable, "-m", "pliant", *words, spec, f"workers={{{workers}}}"]
        answer = subprocess.run(
            [*command, "--out", folder],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert answer.returncode == 0, answer.stderr
        found.append([(folder / name).read_bytes() for name in files])
    assert found[0] == found[1]
    assert all(found[0])
