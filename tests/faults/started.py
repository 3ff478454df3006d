"""What the programs of these tests begin with: ``PROGRAM KIND FOLDER ...``, and a file that tells of the process."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

KIND, FOLDER = sys.argv[1], Path(sys.argv[2])
(FOLDER / f"pid-{os.getpid()}").touch()


def note_fault() -> None:
    """Say when the fault happens, for ``scripts/mistake_table.py --failures``."""
    (FOLDER / f"fault-{time.time()}").touch()
