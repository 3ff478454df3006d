"""What the programs of these tests begin with: ``PROGRAM KIND FOLDER ...``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

KIND, FOLDER = sys.argv[1], Path(sys.argv[2])


def note_fault() -> None:
    """Say when the fault happens: the seconds until all ranks are gone count from here."""
    (FOLDER / f"fault-{time.time()}").touch()
