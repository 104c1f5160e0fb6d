import subprocess
import sys

import pytest
from tests.waiting import LIMIT
from tests.workers.test_ray_backend import cluster, pytestmark  # noqa: F401 - a fixture and a skip mark

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
ASYNCHRONOUS = RUN.replace(
    'type = "distreal"',
    'type = "fedbuff"\nbuffer = 2\nconcurrency = 5\ninner = { type = "coherent" }',
).replace("local = { batch = 10 }\n", "")
SPLIT = """
rounds = 2
per_round = 3

[method]
type = "auxsplit"
every = 8
cut = "features.2"
local = { batch = 10 }

[network]
name = "digits_cnn"

[data]
proxy = 7700

[fleet]
size = 3

[rules]
late = "wait"
"""
SEARCH = """
[data]
proxy = 200
[search]
algorithm = { type = "fast", min_design = 6, rounds = 1, per_round = 3, vectors = 3 }
corner_seeds = 2
fresh_seeds = 2
rows = 4
[search.objective]
batches = 2
batch = 8
seeds = 1
snapshot_batches = 2
eval_images = 40
"""


@pytest.mark.slow  # two nodes and four imports of torch
@pytest.mark.parametrize(
    ("arguments", "text", "files"),
    [
        (["run"], RUN, ["events.jsonl"]),
        (["run"], ASYNCHRONOUS, ["events.jsonl"]),
        (["run"], SPLIT, ["events.jsonl"]),
        (["search", "--no-pictures"], SEARCH, ["trials.jsonl", "table.safetensors"]),
    ],
    ids=["run", "asynchronous", "split", "search"],
)
def test_two_ray_nodes_write_the_files_of_inline(cluster, arguments, text, files, tmp_path):  # noqa: F811
    address, environment = cluster
    experiment = tmp_path / "small.toml"
    experiment.write_text(text)
    contents = []
    # a node has one CPU, so two workers are on two nodes
    for workers in ('type="inline"', f'type="ray",address="{address}",count=2'):
        folder = tmp_path / str(len(contents))
        command = [sys.executable, "-m", "pliant", *arguments, experiment, f"workers={{{workers}}}"]
        command += ["--out", folder]
        process = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT
        )
        assert process.returncode == 0, process.stderr
        contents.append([(folder / name).read_bytes() for name in files])
    assert contents[0] == contents[1]
    assert all(contents[0])
