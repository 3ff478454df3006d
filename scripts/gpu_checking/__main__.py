"""Run one part: ``python -m gpu_checking MODULE.FUNCTION FINDINGS [--small]``."""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import traceback
from pathlib import Path

from gpu_checking.report import Report, Skipped, is_out_of_memory

#: Exit statuses of a part that cannot run here, and of one for which memory was too small.
SKIPPED, NO_MEMORY = os.EX_UNAVAILABLE, os.EX_OSERR


def simulate_if_asked() -> None:
    """Have this process use simulated GPUs where the environment asks for Numba's simulator, as in a rehearsal."""
    from tests.support.simulated import ASKED, simulate_gpus  # the path may have no tests where only a page is written

    if ASKED:
        simulate_gpus()


def main() -> int:
    """Run the part, and return the exit status."""
    place, findings, *options = sys.argv[1:]
    module, function = place.split(".")
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # what a part that hangs is asked for
    report = Report(Path(findings))
    try:
        simulate_if_asked()
        getattr(importlib.import_module(f"gpu_checking.{module}"), function)(report, "--small" in options)
    except Skipped as reason:
        report.figure("skipped", reason)
        return SKIPPED
    except BaseException as error:
        traceback.print_exc()
        report.figure("error", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return NO_MEMORY if is_out_of_memory(error) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
