from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import numpy as np
from mpizero.nn import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    arrays = [np.ones(1 << 20, np.uint8) for _ in range(24)]
    del arrays

if sys.argv[1] == "keep" and not keep_freed_memory():
    print("unknown")
    sys.exit()
for _ in range(3):
    step()
before = faults()
for _ in range(4):
    step()
print(faults() - before)
"""


@pytest.mark.slow
def test_steps_after_the_first_fault_no_memory_in():
    """In processes of their own: the setting is the C library's."""
    counts = {}
    for mode in ("default", "keep"):
        done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
        counts[mode] = done.stdout.strip()
    if counts["keep"] == "unknown":
        pytest.skip("the C library is not glibc")
    # Not none at all: a busy machine takes pages away, too.
    assert 10 * int(counts["keep"]) < int(counts["default"]), counts
