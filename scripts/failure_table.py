"""Let one rank of a job fail in many ways, under one or more MPI libraries, and print how each job ended.

    python scripts/failure_table.py [--ranks 2 4 8] [--faults raise kill ...] [--launcher "mpiexec python" ...]

It prints a line for each job: launcher, fault, number of ranks, seconds from the fault until every rank had ended, exit
status, and a verdict, which is "ok" or says what is wrong. The default launchers are those in the environment variable
MPIZERO_MPIEXEC, or the mpiexec in the folder of this Python interpreter.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from harness.jobs import ROOT, Ended, Mpi, launchers, run
from harness.options import plain

TESTS = ROOT / "tests" / "faults"
#: Seconds within which all ranks must be gone after the fault; seconds that a whole job may take.
SOON, LIMIT = 5.0, 40.0
#: Faults of the rank that fails, as tests/faults/program.py names them, in the order of the report.
FAILURES = ("raise", "segfault", "kill", "exit_0", "interrupt")
#: Wrong collectives that the last rank calls, as contract_program.py names them.
ORDERS = ("order", "order_at_the_end", "order_of_a_set", "engine")
#: Mistakes for which MPICH itself ends a rank; the launcher may return the status of another rank that it killed.
REFUSED = ("count", "dtype")
MISMATCHES = (*ORDERS, "operation", "extra", "missing", *REFUSED)


def ended_by(mpi: Mpi, fault: str, ranks: int, debug: bool) -> tuple[Ended, float]:
    """Run a job whose last rank fails or calls a wrong collective, as ``fault`` says.

    Return how it ended, and the seconds from the fault, or else the start, until all ranks were gone. With ``debug``
    all collectives are compared before they start.
    """
    with tempfile.TemporaryDirectory() as name:
        program = TESTS / ("program.py" if fault in FAILURES else "programs/contract_program.py")
        command = mpi.command(ranks, [program, fault, name, *([ranks - 1] if fault in FAILURES else [])])
        environment = {"MPIZERO_DEBUG": "collectives"} if debug else {}
        ended = run(command, LIMIT, environment=environment, cwd=Path(name))
        faults = [float(path.name.removeprefix("fault-")) for path in Path(name).glob("fault-*")]
    return ended, ended.gone - min(faults) if faults else ended.seconds


def verdict(ended: Ended, seconds: float, fault: str) -> str:
    """Return "ok" if the job with ``fault`` ended as it must, else a text that says what is wrong."""
    tracebacks, wrong = ended.err.count("Traceback (most recent call last)"), fault in MISMATCHES
    reports = ended.err.count("CollectiveMismatch: ") + ended.err.count("stuck: ")
    found = {
        "hang": ended.late,
        "slow": seconds >= SOON,
        f"{ended.strays} processes left": ended.strays,
        "status 0": ended.status == 0,
        f"{tracebacks} tracebacks": fault == "raise" and tracebacks != 1,
        "not named": wrong and ended.err.count("contract_program.py:") < 2,  # the lines of the ranks that differ
        "another status": wrong and ended.status != 76 and fault not in REFUSED,
        "several reports": reports > 1,
    }
    return ", ".join(text for text, is_so in found.items() if is_so) or "ok"


def main() -> None:
    """Run all jobs, and print the table; exit with status 1 if a job did not end as it must."""
    parser = plain(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--faults", nargs="+", default=[*FAILURES, *MISMATCHES], choices=[*FAILURES, *MISMATCHES])
    parser.add_argument("--launcher", action="append", metavar="'MPIEXEC PYTHON'")
    parser.add_argument("--debug", action="store_true", help="compare every collective before it starts")
    options = parser.parse_args()
    failed = 0
    print(f"{'launcher':24} {'fault':18} {'ranks':>5} {'seconds':>8} {'status':>6}  verdict")
    for mpi in launchers(options.launcher):
        for fault in options.faults:
            for ranks in options.ranks:
                ended, seconds = ended_by(mpi, fault, ranks, options.debug)
                text = verdict(ended, seconds, fault)
                failed += text != "ok"
                print(
                    f"{mpi.mpiexec[-24:]:24} {fault:18} {ranks:5} {seconds:8.2f} {ended.status:6}  {text}", flush=True
                )
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
