import resource
import subprocess
import sys

import pytest

from pliant import memory

CHURN = """
import ctypes, resource, sys
from pliant import memory
if sys.argv[1] == "keep":
    assert memory.keep()
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


def faults(mode):
    command = [sys.executable, "-c", CHURN, mode]
    env = {"MALLOC_TRIM_THRESHOLD_": "131072"}  # as where a program has set nothing dynamic off
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return int(done.stdout)


@pytest.mark.skipif(not memory.keep(), reason="the C library is not glibc")
def test_what_a_step_frees_is_there_for_the_next_one():
    assert faults("keep") < 3 * PAGES
    assert faults("plain") > 15 * PAGES  # each of 20 blocks faults in anew


def test_giving_back_does_no_harm():
    memory.give_back()
