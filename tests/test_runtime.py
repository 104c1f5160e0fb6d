import resource
import subprocess
import sys

import pytest
import torch

from pliant import runtime

CHURN = """
import ctypes, resource, sys
from pliant import runtime
if sys.argv[1] == "retain":
    assert runtime.retain_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
size = 16 * 2**20
first = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - first)
"""
PAGES = 16 * 2**20 // resource.getpagesize()


def count_page_faults(mode):
    command = [sys.executable, "-c", CHURN, mode]
    env = {"MALLOC_TRIM_THRESHOLD_": "131072"}  # the default before glibc adapts it
    process = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return int(process.stdout)


@pytest.mark.skipif(not runtime.retain_freed_memory(), reason="the C library is not glibc")
def test_freed_memory_is_retained_for_the_next_step():
    assert count_page_faults("retain") < 3 * PAGES
    assert count_page_faults("plain") > 15 * PAGES  # each of 20 blocks faults in again


def test_releasing_memory_does_not_fail():
    runtime.release_freed_memory()


def test_a_cgroup_v2_quota_is_read(tmp_path):
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert runtime.read_cpu_quota(tmp_path) == 1.5


def test_a_cgroup_v1_quota_is_read(tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("50000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert runtime.read_cpu_quota(tmp_path) == 0.5


@pytest.mark.parametrize("text", ["max 100000\n", "nonsense\n", "-1 100000\n", "1 0\n"])
def test_no_quota_is_none(tmp_path, text):
    (tmp_path / "cpu.max").write_text(text)
    assert runtime.read_cpu_quota(tmp_path) is None
    assert runtime.read_cpu_quota(tmp_path / "nowhere") is None


SHAPES = """
import sys
if sys.argv[1] == "retain":
    import pliant.nn.elastic
import torch
for turn in range(2):
    print(f"turn {turn}", flush=True)
    for inputs in range(3, 23):
        for outputs in range(3, 33):
            weight = torch.ones(outputs, inputs, 3, 3)
            torch.nn.functional.conv2d(torch.zeros(2, inputs, 4, 4), weight)
"""


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")
# without the setting, the kernels of the first turn are lost
@pytest.mark.parametrize("mode", ["retain", pytest.param("plain", marks=pytest.mark.slow)])
def test_kernels_are_retained_for_the_shapes_of_other_subnets(mode):
    command = [sys.executable, "-c", SHAPES, mode]
    env = {"ONEDNN_VERBOSE": "2", "OMP_NUM_THREADS": "1"}
    lines = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
    first, second = (turn.count("create:cache_miss") for turn in lines.split("turn ")[1:])
    assert first > 1024  # what oneDNN keeps by default
    assert (second == 0) == (mode == "retain")


LIMITS = """
import resource
from pliant import runtime
hard = min(2000, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
runtime.raise_file_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
"""


def test_a_process_may_have_as_many_connections_as_its_administrator_allows():
    subprocess.run([sys.executable, "-c", LIMITS], check=True)
