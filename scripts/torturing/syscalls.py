"""Kill ranks at chosen system calls of saves by strace, let these calls fail or last long, and check their order."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from harness.jobs import Ended, run
from harness.outcomes import Row

from torturing.cases import (
    SAVER,
    Torture,
    acknowledged,
    hidden,
    prepare,
    problem_of_ending,
    problem_of_folder,
    problem_of_next_save,
)
from torturing.saver import MARKS

#: The system calls that change files.
WRITES = (
    "write,writev,pwrite64,pwritev,pwritev2,fallocate,ftruncate,fsync,fdatasync,sync_file_range,rename,renameat,renameat2,"
    "mkdir,mkdirat,unlink,unlinkat,rmdir,link,linkat,symlink,symlinkat"
)
_LINE = re.compile(r"(?P<thread>\d+) +(?P<time>[\d.]+) (?P<name>\w+)\((?P<rest>.*)")
_PATH = re.compile(r'<(/[^>]*)>|"(/[^"]*)"')
#: The error with which each system call is refused.
ERRORS = dict.fromkeys(("pwrite64", "write", "writev", "pwritev", "fallocate", "mkdir"), "ENOSPC")
ERRORS |= dict.fromkeys(("ftruncate", "fsync", "fdatasync", "rename", "renameat2"), "EIO")


@dataclass(frozen=True)
class Call:
    """Describe one system call in strace's log.

    ``number`` counts the calls of this name in its thread. ``main`` says whether it is the main thread. ``window`` is
    the number of the save that the call belongs to; 0 if it belongs to none.
    """

    thread: int
    main: bool
    time: float
    name: str
    number: int
    path: str
    window: int
    first: bool  # whether no other thread made as many calls of this name before
    among: int  # its number among the calls of its name and thread on the same path


def traced(log: Path, more: str = "") -> str:
    """Return the line of bash that runs a program under strace; ``more`` are further options of strace."""
    return f'exec strace -D -f -qq -y -ttt -o {log} -e trace={WRITES},access,faccessat,faccessat2 {more} "$@"'


def read_log(log: Path, run_folder: Path) -> list[Call]:
    """Return the system calls in strace's log ``log`` that change files in ``run_folder``, in order."""
    calls: list[Call] = []
    counts: Counter[tuple[int, str]] = Counter()
    most: Counter[str] = Counter()
    places: Counter[tuple[int, str, str]] = Counter()
    main, window, saves = -1, 0, 0
    for line in log.read_text(errors="replace").splitlines():
        if not (match := _LINE.match(line)):
            continue
        thread, name, rest = int(match["thread"]), match["name"], match["rest"]
        main = thread if main < 0 else main
        if MARKS[0] in rest:
            saves += 1
            window = saves
        elif MARKS[1] in rest:
            window = 0
        if name.endswith(("access", "accessat", "accessat2")):
            continue
        counts[thread, name] += 1
        number = counts[thread, name]
        first = number > most[name]
        most[name] = max(most[name], number)
        found = _PATH.search(rest)
        path = (found[1] or found[2]) if found else ""
        if path == str(run_folder) or path.startswith(f"{run_folder}/"):
            places[thread, name, path] += 1
            calls.append(
                Call(thread, thread == main, float(match["time"]), name, number, path, window, first,
                     places[thread, name, path])
            )  # fmt: skip
    return calls


def saving(folder: Path, how: str, steps: int = 1, keep: int = 1) -> list[str]:
    """Return the command line of saver.py without the interpreter; the arguments are those of saver.py."""
    return [SAVER, str(folder), str(steps), how, str(keep)]


@cache
def points_of(torture: Torture, how: str, victim: int) -> tuple[list[Call], str]:
    """Run a job that saves once and removes the previous checkpoint; return the system calls of rank ``victim`` in it.

    Also return a problem if the job fails, else "". Paths begin after the folder of the case.
    """
    ranks = torture.options.ranks
    with torture.case() as folder:
        log = folder / "log"
        command = torture.mpi_of(how).command(ranks, saving(prepare(folder), how), victim, traced(log))
        ended = run(command, torture.limit, folder)
        if ended.status:
            return [], f"a save that nothing happens to fails: {ended.err[-500:]}"
        # Folders of other cases have other names: keep the path inside the folder.
        prefix = len(str(folder))
        calls = [call for call in read_log(log, folder / "run") if call.window == 1]
        return [Call(**{**vars(call), "path": call.path[prefix:]}) for call in calls], ""


def wrapper_for(call: Call, victim: int, folder: Path, effect: str) -> str:
    """Return a line of bash that runs rank ``victim`` under strace, with ``effect`` at exactly this call.

    ``effect`` is what strace's option ``inject`` takes, for example "signal=KILL". Return "" if that is impossible. For
    calls of rank 0's main thread, strace counts only calls on the same path. This is exact although an MPI library also
    changes files when it starts, and not always equally often. It is not possible for other ranks, because the path
    contains rank 0's process id, which they do not know. For all other calls strace counts each thread's calls of this
    name. That is possible only if no other thread has made as many of them before.
    """
    inject = f"-e inject={call.name}:{effect}:when="
    if call.main and victim == 0:
        path = re.sub(r"(\.tmp-[^/]*\.)\d+(?=/|$)", r"\1$$", str(folder) + call.path)
        return traced(folder / "log", f'{inject}{call.among} -P "{path}"')
    return traced(folder / "log", f"{inject}{call.number}") if call.first else ""


def planted_for(call: Call, calls: Sequence[Call], victim: int) -> str:
    """Return a value of MPIZERO_FAULT by which the library itself kills rank ``victim`` just before the write ``call``.

    ``calls`` are all calls of that rank in the save.
    """
    before = [c for c in calls if c.thread == call.thread and c.name == call.name]
    return f"save.write:{victim}:{before.index(call) + 1}:kill"


def chosen_calls(
    torture: Torture, row: Row, how: str, sample: int, wanted: Callable[[Call, int], bool] = lambda call, victim: True
) -> Iterator[tuple[int, Call, list[Call]]]:
    """Yield of the first and the last rank the system calls that are ``wanted``, a ``sample`` of them if it is not 0.

    Each comes with its rank, and with all calls of this rank. A sample is spread over them, elsewhere for each rank.
    """
    draw = torture.random
    for victim in (0, torture.options.ranks - 1):
        every, problem = points_of(torture, how, victim)
        calls = [call for call in every if wanted(call, victim)]
        if problem or not calls:
            row.add(problem or "no system calls found", "", f"rank {victim}")
        count, start = min(sample or len(calls), len(calls)), draw.random()
        yield from ((victim, calls[int((k + start) * len(calls) / count)], every) for k in range(count))


def disturbed(
    torture: Torture, row: Row, how: str, victim: int, call: Call, effect: str, planted: str,
    problem_of: Callable[[Ended, Path], str],
) -> None:  # fmt: skip
    """Save in a new job with ``effect`` at one system call of rank ``victim``, and add what becomes of it to ``row``.

    Where strace cannot find the call, ``planted`` is the value of MPIZERO_FAULT that has the same effect.
    """
    with torture.case() as folder:
        run_folder, variables = prepare(folder), {}
        wrapper = wrapper_for(call, victim, folder, effect)
        if not wrapper:
            variables, wrapper = {"MPIZERO_FAULT": planted}, 'exec "$@"'
        command = torture.mpi_of(how).command(torture.options.ranks, saving(run_folder, how), victim, wrapper)
        ended = run(command, torture.limit, folder, environment=variables)
        problem = problem_of(ended, run_folder)
        outcome = "new one kept" if (run_folder / "step_00000002").exists() else "old one kept"
        outcome += ", ended by the watchdog" if stuck_in_hdf5(ended) else ""
        case = f"rank {victim}, {effect} at {call.name} {call.number} of {Path(call.path).name}"
        row.add(problem or problem_of_next_save(run_folder), outcome, case)


def kill_everywhere(torture: Torture, how: str, sample: int) -> None:
    """Kill one rank at each system call by which a save changes files, each time in a new job."""
    row = torture.table.row(f"killed at every system call, {how}")

    def problem_of(ended: Ended, run_folder: Path) -> str:
        return problem_of_ending(ended) or problem_of_folder(run_folder)

    for victim, call, calls in chosen_calls(torture, row, how, sample):
        disturbed(torture, row, how, victim, call, "signal=KILL", planted_for(call, calls, victim), problem_of)


def refuse_everywhere(torture: Torture, how: str, sample: int) -> None:
    """Let each system call of a save fail once, as on a full or broken disk, each time in a new job."""
    row = torture.table.row(f"refused by the disk at every system call, {how}")

    def can_fail(call: Call, victim: int) -> bool:
        known = call.name in ERRORS and ".tmp-del-" not in call.path
        return known and bool(wrapper_for(call, victim, Path(), ""))  # else one under another number is the same call

    for victim, call, _ in chosen_calls(torture, row, how, sample, can_fail):
        problem_of = partial(problem_of_refusal, ERRORS[call.name])
        disturbed(torture, row, how, victim, call, f"error={ERRORS[call.name]}", "", problem_of)


def stuck_in_hdf5(ended: Ended) -> bool:
    """Tell whether the watchdog ended ranks that hung in parallel HDF5 after a write had failed."""
    return "stuck: hdf5 close" in ended.err and "state.h5" in ended.err


def problem_of_refusal(error: str, ended: Ended, run_folder: Path) -> str:
    """Return what is wrong after a save in which a system call failed with ``error``; "" if nothing is.

    There must be one clear error, no temporary file, and a whole newest checkpoint. If the new checkpoint is written
    and only an old one cannot be removed, the job must print a notice and go on. Ranks that the watchdog has ended may
    leave temporary files, which the next save removes.
    """
    text = {"ENOSPC": "No space left on device", "EIO": "Input/output error"}[error]
    kept = "old checkpoint not removed" in ended.err and acknowledged(run_folder) > 1
    if problem := problem_of_ending(ended, expected=not kept):
        return problem
    told, stuck = kept or "was not written" in ended.err, stuck_in_hdf5(ended)
    if text not in ended.err or not (told or stuck) or "Traceback" in ended.err:
        return f"not a clear error: {ended.err[-600:]}"
    if hidden(run_folder) and not stuck:
        return f"{hidden(run_folder)} stayed"
    return problem_of_folder(run_folder)


def check_order(torture: Torture, how: str) -> None:
    """Check the order of the system calls of all ranks in three saves.

    It must be: write the files, fsync the files and their folder, rename the folder, fsync its parent.
    """
    row = torture.table.row(f"written, made durable, then renamed: {how}")
    ranks = torture.options.ranks
    with torture.case() as folder:
        run_folder = prepare(folder)
        program = saving(run_folder, how, steps=3)
        wrapper = traced(folder / "log.$PMI_RANK$OMPI_COMM_WORLD_RANK")
        command = torture.mpi_of(how).command(ranks, program)
        split = command.index("-n") + 2
        command = [*command[:split], "bash", "-c", wrapper, "all", *command[split:]]
        ended = run(command, torture.limit, folder)
        calls = [c for rank in range(ranks) for c in read_log(folder / f"log.{rank}", run_folder) if c.window]
        for window in range(1, 4):
            mine = sorted((c for c in calls if c.window == window), key=lambda c: c.time)
            row.add(ended.err[-300:] if ended.status else _disorder(mine, run_folder), "in order", f"save {window}")


def _disorder(calls: Sequence[Call], run_folder: Path) -> str:
    """Return which of the calls of one save (in order of time) came too late, or ""; see :func:`check_order`."""
    rename = next((c for c in calls if c.name.startswith("rename") and ".tmp-step" in c.path), None)
    if rename is None:
        return "no rename was seen"
    last: dict[str, float] = {}
    synced: dict[str, float] = {}
    for call in calls:
        if call.time < rename.time:
            kind = synced if call.name in ("fsync", "fdatasync") else last
            kind[call.path] = call.time
    files = [path for path in last if path.endswith((".h5", ".json"))]
    late = [path for path in files if synced.get(path, 0) < last[path]]
    stage = rename.path
    if len(files) != 2 or late:
        return f"not durable before the rename: {late or files}"
    if synced.get(stage, 0) < max(synced[path] for path in files):
        return "the folder's names are not durable before the rename"
    after = [c for c in calls if c.name == "fsync" and c.path == str(run_folder) and c.time > rename.time]
    return "" if after else "the rename was not made durable"


def slow_rank(torture: Torture, how: str) -> None:
    """Delay writes of one rank, and check that the save waits for it."""
    row = torture.table.row(f"a slow disk on one rank: {how}")
    for victim in (0, torture.options.ranks - 1):
        with torture.case() as folder:
            run_folder = prepare(folder)
            delay = "-e inject=pwrite64,fsync:delay_enter=150000:when=1..10"
            command = torture.mpi_of(how).command(
                torture.options.ranks, saving(run_folder, how, 2), victim, traced(folder / "log", delay)
            )
            ended = run(command, torture.limit, folder)
            problem = ended.err[-300:] if ended.status or ended.late else problem_of_folder(run_folder, 3)
            row.add(problem, "saved", f"rank {victim}")


def have_strace() -> str:
    """Return the reason why this process cannot use strace; "" if it can."""
    if shutil.which("strace") is None:
        return "needs strace"
    ended = run(["strace", "-D", "-qq", "-o", "/dev/null", "true"], 10)
    return "" if ended.status == 0 else "strace may not trace here"
