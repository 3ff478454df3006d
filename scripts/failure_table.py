"""Let one rank of a job fail in many ways, under one or more MPI libraries, and print how each job ended.

    python scripts/failure_table.py [--ranks 2 4 8] [--faults raise kill ...] [--launcher "mpiexec python" ...]

It prints a line for each job: launcher, fault, number of ranks, seconds from the fault until every rank had ended, exit
status, and a verdict, which is "ok" or says what is wrong. The default launchers are those in the environment variable
MPIZERO_MPIEXEC, or the mpiexec in the folder of this Python interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.faults.jobs import SOON, Ended, launchers, run_job  # noqa: E402

TESTS = ROOT / "tests" / "faults"
#: Faults of the rank that fails, as tests/faults/program.py names them, in the order of the report.
FAILURES = ("raise", "segfault", "kill", "exit_0", "interrupt")
#: Wrong collectives that the last rank calls, as contract_program.py names them.
ORDERS = ("order", "order_at_the_end", "order_of_a_set", "engine")
#: Mistakes for which MPICH itself ends a rank; the launcher may return the status of another rank that it killed.
REFUSED = ("count", "dtype")
MISMATCHES = (*ORDERS, "operation", "extra", "missing", *REFUSED)


def run(launcher: tuple[str, str], fault: str, ranks: int, debug: bool) -> Ended:
    """Run a job whose last rank fails or calls a wrong collective, as ``fault`` says, and return how the job ended.

    ``launcher`` is an mpiexec and a Python interpreter. With ``debug`` all collectives are compared before they start.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = TESTS / ("program.py" if fault in FAILURES else "programs/contract_program.py")
        command = [program, fault, folder, *([ranks - 1] if fault in FAILURES else [])]
        environment = {"MPIZERO_DEBUG": "collectives"} if debug else {}
        with contextlib.redirect_stdout(io.StringIO()):
            return run_job(launcher, folder, command, ranks, environment=environment)


def verdict(ended: Ended, fault: str) -> str:
    """Return "ok" if the job with ``fault`` ended as it must, else a text that says what is wrong."""
    expected = 1 if fault == "raise" else None
    tracebacks = ended.err.count("Traceback (most recent call last)")
    wrong = [
        "slow" if ended.seconds >= SOON else "",
        "status 0" if ended.status == 0 else "",
        f"{tracebacks} tracebacks" if expected is not None and tracebacks != expected else "",
        "not named" if fault in MISMATCHES and not named(ended) else "",
        "another status" if fault in MISMATCHES and ended.status != 76 and fault not in REFUSED else "",
        "several reports" if ended.err.count("CollectiveMismatch: ") + ended.err.count("stuck: ") > 1 else "",
    ]
    return ", ".join(filter(None, wrong)) or "ok"


def named(ended: Ended) -> bool:
    """Tell whether the report of a wrong collective names at least two source lines, those of the ranks that differ."""
    return ended.err.count("contract_program.py:") >= 2


def main() -> None:
    """Run all jobs, and print the table; exit with status 1 if a job did not end as it must."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--faults", nargs="+", default=[*FAILURES, *MISMATCHES], choices=[*FAILURES, *MISMATCHES])
    parser.add_argument("--launcher", action="append", metavar="'MPIEXEC PYTHON'")
    parser.add_argument("--debug", action="store_true", help="compare every collective before it starts")
    options = parser.parse_args()
    chosen = [tuple(text.split()) for text in options.launcher or ()] or launchers()
    failed = 0
    print(f"{'launcher':24} {'fault':18} {'ranks':>5} {'seconds':>8} {'status':>6}  verdict")
    for launcher in chosen:
        for fault in options.faults:
            for ranks in options.ranks:
                ended = run(launcher, fault, ranks, options.debug)
                text = verdict(ended, fault)
                failed += text != "ok"
                figures = f"{ranks:5} {ended.seconds:8.2f} {ended.status:6}"
                print(f"{launcher[0][-24:]:24} {fault:18} {figures}  {text}", flush=True)
    raise SystemExit(int(failed > 0))


if __name__ == "__main__":
    main()
