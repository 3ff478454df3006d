"""Check whether this machine meets the requirements of training, and say how to correct problems.

Each check is a function that returns a :class:`CheckResult`. The checks in :data:`CHECKS` try libraries and hardware.
The checks in :data:`LAUNCH_CHECKS` compare ranks, nodes and threads with the environment variables of the launcher and
Slurm. :func:`examine` runs all checks, and :func:`report` formats their results. :func:`bug_report` formats them for a
bug report, as one block of text to copy, without names of users and hosts.
"""

from __future__ import annotations

import json
import os
import platform
import pwd
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

from mpizero._util.launch import Launch, integer_of
from mpizero.comm import Communicator
from mpizero.comm.startup import available_memory, memory_of_node, mpi_facts, versions
from mpizero.errors import ConfigError, ExitStatus
from mpizero.guard.reports import SHARED_FOLDER, Leftover, leftovers, remove_leftovers, session_folders
from mpizero.kernels.matmul import foreign_products
from mpizero.sharding.exactness import bits
from mpizero.train import machine
from mpizero.train.stopping import Limit, slurm_limit

Status = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True)
class CheckResult:
    """Hold the outcome of one check.

    Attributes
    ----------
    name : str
        Name of the check.
    status : {"ok", "warn", "FAIL"}
        "warn" if training works, but not as well as it could; "FAIL" if it does not work.
    text : str
        What the check has found.
    remedy : str
        What the user can do about a problem; "" if there is nothing to do.
    code : int
        Exit status of ``mpizero doctor`` if ``status`` is "FAIL"; otherwise without meaning.
    """

    name: str
    status: Status
    text: str
    remedy: str = ""
    code: int = ExitStatus.CONFIG


def counted(number: int, noun: str) -> str:
    """Format a number with its noun, for example "1 rank" or "3 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def check_launch(comm: Communicator, threads: int, environment: Mapping[str, str]) -> CheckResult:
    """Compare MPI's ranks and nodes with the launcher's and Slurm's. Collective over ``comm``."""
    local = Launch.of(environment)
    every = comm.allgather_object((local, machine.host()))
    nodes, slurm_nodes = len({host for _, host in every}), integer_of(environment, "SLURM_JOB_NUM_NODES")
    tasks = integer_of(environment, "SLURM_NTASKS") if local.name.startswith("mpiexec") else None
    text = f"{local.name or 'no launcher'}: {counted(comm.size, 'rank')} on {counted(nodes, 'node')}"
    for rank, (launch, _) in enumerate(every):
        if launch.rank not in (None, rank):
            text += f"; MPI's rank {rank} is the launcher's {launch.rank}"
            return CheckResult("launch", "warn", text, "do not mix launchers: messages that name ranks mean MPI's")
    if slurm_nodes is not None and slurm_nodes != nodes:
        text += f"; Slurm has given {counted(slurm_nodes, 'node')}"
        return CheckResult("launch", "warn", text, "start the ranks with srun, or with an mpiexec that knows Slurm")
    if tasks is not None and tasks != comm.size and "SLURM_STEP_ID" not in environment:
        text += f"; Slurm has given {counted(tasks, 'task')}"
        return CheckResult("launch", "warn", text, "start as many ranks as the job has tasks, or ask for as many tasks")
    return CheckResult("launch", "ok", text)


def check_threads(comm: Communicator, threads: int, environment: Mapping[str, str]) -> CheckResult:
    """Compare the ranks' numbers of threads with each other and with the CPUs of a Slurm task. Collective."""
    name = "threads"
    if wrong := difference(comm.allgather_object(threads)):
        advice = "export the same OMP_NUM_THREADS to all ranks, or results differ in bits"
        return CheckResult(name, "FAIL", wrong, advice)
    cpus = integer_of(environment, "SLURM_CPUS_PER_TASK")
    text = f"{counted(threads, 'thread')} a rank"
    if cpus is not None and cpus != threads:
        advice = f"export OMP_NUM_THREADS={cpus}; srun of Slurm 22.05 and later also needs --cpus-per-task={cpus}"
        return CheckResult(name, "warn", f"{text}, but Slurm has given {counted(cpus, 'CPU')} a task", advice)
    unset = "" if "OMP_NUM_THREADS" in environment else ", as OMP_NUM_THREADS is not set"
    return CheckResult(name, "ok", f"{text}{unset}")


def check_time(comm: Communicator, threads: int, environment: Mapping[str, str]) -> CheckResult:
    """Report how much time the Slurm job has left. Collective over ``comm``."""
    limit: Limit | None = comm.broadcast_object(slurm_limit(environment) if comm.rank == 0 else None)
    if limit is not None:
        text = f"{limit.left / 60:.0f} min left ({limit.source}); training saves before"
        return CheckResult("time limit", "ok", text)
    if environment.get("SLURM_JOB_ID"):
        advice = "give train.time_limit if there is one, or training cannot save before it"
        return CheckResult("time limit", "warn", "Slurm does not say when the job ends", advice)
    return CheckResult("time limit", "ok", "none seen: not a Slurm job")


T = TypeVar("T")


def difference(values: Sequence[T]) -> str:
    """Describe the first rank whose value differs from rank 0's, with both values; "" if all are equal.

    Not collective. ``values`` has one entry for each rank.
    """
    other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
    return "" if other is None else f"rank 0 has {values[0]}, rank {other} has {values[other]}"


def check_versions(comm: Communicator, threads: int) -> CheckResult:
    """Compare Python and library versions over the ranks. Collective over ``comm``."""
    local = versions()
    every = comm.allgather_object(local)
    text = ", ".join(f"{name} {version}" for name, version in local.items())
    for name in local:
        values = [names_of[name] for names_of in every]
        if len(set(values)) > 1:
            differ = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            text = f"{name} differs: {differ}"
            return CheckResult("versions", "FAIL", text, "install the same environment on every node")
    if missing := [name for name, version in local.items() if version == "missing"]:
        return CheckResult("versions", "FAIL", text, f"pip install {' '.join(missing)}")
    return CheckResult("versions", "ok", text)


def check_mpi(comm: Communicator, threads: int) -> CheckResult:
    """Compare the ranks' MPI libraries, check the thread level, and test a reduction. Collective over ``comm``."""
    facts = mpi_facts()
    if facts is None:
        advice = "pip install mpich, or a system's MPI; a program that a rank has started has none"
        return CheckResult("mpi", "warn", "no MPI can be loaded: one process only", advice)
    names = [f"{rank_facts.library}, mpi4py {rank_facts.mpi4py}" for rank_facts in comm.allgather_object(facts)]
    if wrong := difference(names):
        return CheckResult("mpi", "FAIL", wrong, "install the same MPI and mpi4py on every node")
    total, seconds = machine.try_reduction(comm)
    ranks = counted(comm.size, "rank")
    text = f"{facts.vendor} {facts.version}, mpi4py {facts.mpi4py}, threads {facts.thread_level}, {ranks}"
    if total != comm.size * (comm.size - 1) // 2:
        return CheckResult("mpi", "FAIL", f"{text}; a sum over ranks is wrong", "reinstall MPI", ExitStatus.RANK_FAILED)
    if facts.thread_level != "MULTIPLE":
        return CheckResult("mpi", "warn", text, "unset MPI4PY_RC_THREAD_LEVEL: the watchdog needs the level MULTIPLE")
    return CheckResult("mpi", "ok", f"{text}; a small reduction takes {seconds * 1e6:.0f} µs")


#: If 1 MiB needs more calls of MPI than this, less than 20 KB move in a call, and hardly any messages of a step move
#: while ranks compute.
_SLOW_MESSAGES = 50


def check_messages(comm: Communicator, threads: int) -> CheckResult:
    """Count how many calls of MPI, one every 10 ms, sending 1 MiB between nodes takes. Collective over ``comm``."""
    calls = machine.try_message(comm)
    if calls is None:
        return CheckResult("messages", "ok", "all ranks are on one node")
    more = "more than " if calls > machine.MOST_CALLS else ""
    text = f"1 MiB between nodes takes {more}{counted(min(calls, machine.MOST_CALLS), 'call')} of MPI, 10 ms apart"
    if calls <= _SLOW_MESSAGES:
        return CheckResult("messages", "ok", f"{text}: messages move while ranks compute")
    advice = "messages hardly move while ranks compute: with MPICH try MPIR_CVAR_CH4_NETMOD=ofi, or the site's own MPI"
    return CheckResult("messages", "warn", text, advice)


def check_cores(comm: Communicator, threads: int) -> CheckResult:
    """Compare the number of cores of every node with its ranks x ``threads``. Collective over ``comm``."""
    with comm.split_node(name="doctor") as node:
        sets = node.allgather_object(machine.cores())
        ranks = node.size
    together = len(set().union(*sets))
    nodes = sorted(set(comm.allgather_object((machine.host(), ranks, together, len(machine.cores())))))
    text = "; ".join(
        f"{name}: {counted(count, 'rank')} x {counted(threads, 'thread')} on {counted(cores, 'core')}"
        for name, count, cores, _ in nodes
    )
    over = [name for name, count, cores, rank_cores in nodes if count * threads > cores or threads > rank_cores]
    idle = [name for name, count, cores, _ in nodes if count * threads <= cores // 2]
    advice = []
    if over:
        advice.append(f"start fewer ranks or set OMP_NUM_THREADS lower: {', '.join(over)} has fewer cores than work")
    elif idle:
        advice.append("start more ranks or set OMP_NUM_THREADS higher: cores stay idle")
    if len({count for _, count, _, _ in nodes}) > 1:
        advice.append("start the same number of ranks on every node, or memory is not shared")
    return CheckResult("cores", "warn" if advice else "ok", text, "; ".join(advice))


def check_blas(comm: Communicator, threads: int) -> CheckResult:
    """Report what computes matrix products, and on which CPUs with equal bits; compare the ranks' BLAS. Collective."""
    local, reason = machine.blas(), foreign_products()
    every = comm.allgather_object((local, reason))
    whose = bits([reason] if reason else [])
    if (wrong := difference([build for build, _ in every])) and any(why for _, why in every):
        advice = "use one environment and one CPU type, or results differ in the last bits"
        return CheckResult("blas", "warn", f"{wrong}; bits: {whose}", advice)
    text = f"{wrong or local}; training uses {counted(threads, 'thread')} a rank; bits of models of mz.nn: {whose}"
    return CheckResult("blas", "ok", text)


def check_hdf5(comm: Communicator, threads: int) -> CheckResult:
    """Check that h5py can be imported, and report whether it is built with MPI. Collective over ``comm``."""
    facts = machine.hdf5(comm)
    if facts is None:
        return CheckResult("hdf5", "FAIL", "h5py cannot be imported", "pip install h5py")
    return CheckResult("hdf5", "ok", facts)


def check_memory(comm: Communicator, threads: int) -> CheckResult:
    """Report how much memory the job may use, on the node that allows least. Collective over ``comm``."""
    local = (available_memory(), memory_of_node(), os.uname().nodename)
    known = [(least, total, host) for least, total, host in comm.allgather_object(local) if least is not None]
    if not known:
        return CheckResult("memory", "ok", "the system does not say how much is available")
    least, total, host = min(known)
    text = f"{least / 2**30:.1f} GiB may be taken on {host}"
    if total is not None and least < total:
        text += f", which has {total / 2**30:.1f} GiB available: a control group, or Slurm's --mem, leaves no more"
    if least < 2**30:
        return CheckResult("memory", "warn", text, "ask for more (sbatch --mem): a job that takes more is killed")
    return CheckResult("memory", "ok", text)


def check_shared_memory(comm: Communicator, threads: int) -> CheckResult:
    """Test a shared window on every node: every rank writes a part of it and reads all parts. Collective."""
    wrong = machine.try_shared_memory(comm)
    space = machine.shared_space()
    failed = [f"rank {rank}: {reason}" for rank, reason in enumerate(comm.allgather_object(wrong)) if reason]
    if failed:
        remedy = "set parallel.share_node_memory = false; in a container, give it more shared memory (--shm-size=8g)"
        return CheckResult("shared memory", "FAIL", "; ".join(failed[:3]), remedy, ExitStatus.RANK_FAILED)
    if space is None:
        return CheckResult("shared memory", "ok", "windows work; the system does not say how much room there is")
    free, total = space
    text = f"windows work; {free / 2**30:.1f} of {total / 2**30:.1f} GiB free in {SHARED_FOLDER}"
    if free < 256 * 2**20:
        return CheckResult("shared memory", "warn", text, "give it more room: a model's state of one node lies there")
    return CheckResult("shared memory", "ok", text)


def check_leftovers(comm: Communicator, threads: int, *, clean: bool = False) -> CheckResult:
    """Look for files of ended jobs in shared memory; with ``clean``, remove files that no process uses. Collective."""
    with comm.split_node(name="doctor") as node:
        first = node.rank == 0
    candidates = [*leftovers(), *session_folders()] if first else []
    gone, left = remove_leftovers(candidates) if clean else ([], candidates)
    every = comm.allgather_object((machine.host(), gone, left))
    removed = [item for _, files, _ in every for item in files]
    text = f"removed {counted(len(removed), 'file')} of ended jobs, {_mebibytes(removed)}; " if removed else ""
    spared = [item for _, _, files in every for item in files]
    if not spared:
        return CheckResult("leftovers", "ok", f"{text}none of yours in {SHARED_FOLDER}")
    files = [f"{host}: {item.path}{item.spared and f' ({item.spared})'}" for host, _, items in every for item in items]
    listed = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    remedy = "look at these files yourself, or clean again later" if clean else "mpizero doctor --clean removes them"
    return CheckResult("leftovers", "warn", f"{text}{_mebibytes(spared)} of ended jobs: {listed}", remedy)


def _mebibytes(files: Sequence[Leftover]) -> str:
    return f"{sum(file.nbytes for file in files) / 2**20:.0f} MiB"


def check_kernels(comm: Communicator, threads: int) -> CheckResult:
    """Run one compiled kernel, and report the folder in which compiled kernels are cached. Collective over ``comm``."""
    problem, cache, seconds = machine.try_kernel()
    every = comm.allgather_object((problem, cache))
    for rank, (text, _) in enumerate(every):
        if text:
            remedy = "set MPIZERO_CACHE_DIR to a folder of yours that can be written"
            return CheckResult("kernels", "FAIL", f"rank {rank}: {text}", remedy)
    for rank, (_, folder) in enumerate(every):
        if folder is not None and folder.refused:
            return CheckResult("kernels", "warn", f"rank {rank}: {folder.refused}", folder.remedy)
    text = f"compiled ones are kept in {cache.path}" if cache else ""
    return CheckResult("kernels", "ok", f"{text}; the first took {seconds:.2f} s to be ready")


def check_gpu(comm: Communicator, threads: int) -> CheckResult:
    """Check whether ``device = "cuda"`` works, and how messages between GPUs are sent. Collective over ``comm``."""
    count, packages = machine.gpus()
    usable, reason = machine.devices() if count else (0, "")
    with comm.split_node(name="doctor") as node:
        ranks, local_rank = node.size, node.rank
    everywhere = comm.allgather_object((count, usable, reason, ranks))
    if not any(count for count, *_ in everywhere):
        return CheckResult("gpu", "ok", "none seen; training runs on CPUs")
    text = f"{max(count for count, *_ in everywhere)} on a node; {', '.join(packages) or 'no Python package for it'}"
    for rank, (_, devices, why, _) in enumerate(everywhere):
        if not devices:
            why = why or "no GPU on its node"
            return CheckResult("gpu", "warn", text, f'train.device = "cuda" cannot be used: rank {rank} has {why}')
    most = max(-(-ranks_of_node // devices) for _, devices, _, ranks_of_node in everywhere)
    why = machine.why_through_host(comm, local_rank)
    path = f"through the host's memory: {why}" if why else "from GPU to GPU, as tried"
    text = f'{text}; with train.device = "cuda" {counted(most, "rank")} a GPU, in turn; messages of layers go {path}'
    return CheckResult("gpu", "ok", text)


def check_torch(comm: Communicator, threads: int) -> CheckResult:
    """Compare the ranks' PyTorch; warn if it is built for CUDA but no node has a GPU. Collective over ``comm``."""
    every = comm.allgather_object((*machine.torch_build(), machine.gpus()[0]))
    if wrong := difference([version or "none" for version, _, _ in every]):
        return CheckResult("torch", "warn", wrong, "install the same PyTorch on every node: others give other bits")
    version, cuda, _ = every[0]
    if not version:
        return CheckResult("torch", "ok", "PyTorch is not installed; models of it need the extra torch")
    text = f"PyTorch {version}{f' for CUDA {cuda}' if cuda else ''}"
    if cuda and not any(count for _, _, count in every):
        advice = "CPU nodes need a tenth of it: the command for CPUs at https://pytorch.org/get-started/locally"
        return CheckResult("torch", "warn", f"{text}, but no GPU is seen", advice)
    return CheckResult("torch", "ok", text)


Check = Callable[[Communicator, int], CheckResult]
CHECKS: Sequence[Check] = (
    check_versions,
    check_mpi,
    check_messages,
    check_cores,
    check_blas,
    check_hdf5,
    check_memory,
    check_shared_memory,
    check_leftovers,
    check_kernels,
    check_gpu,
    check_torch,
)
LAUNCH_CHECKS: Sequence[Callable[[Communicator, int, Mapping[str, str]], CheckResult]] = (
    check_launch,
    check_threads,
    check_time,
)


def examine(
    comm: Communicator, threads: int = 1, environment: Mapping[str, str] | None = None, *, clean: bool = False
) -> list[CheckResult]:
    """Run every check, and return the results of rank 0 on every rank.

    Collective over ``comm``.

    Parameters
    ----------
    comm : Communicator
        The ranks to examine.
    threads : int
        Number of threads that each rank will use.
    environment : mapping, optional
        Environment variables of this process; the launcher and Slurm describe the job in them.
    clean : bool
        Whether to remove shared memory of this user's ended jobs that no process uses, on the nodes of ``comm``.
    """
    checks = [partial(check, clean=clean) if check is check_leftovers else check for check in CHECKS]
    results = [check(comm, threads) for check in checks]
    results += [check(comm, threads, environment or {}) for check in LAUNCH_CHECKS]
    result: list[CheckResult] = comm.broadcast_object(results)
    return result


def alone(error: ConfigError) -> CheckResult:
    """Return a "FAIL" for a job in which every rank runs as a separate MPI job of size 1.

    Not collective. The text of ``error`` is split at "; " into the result's text and remedy.
    """
    text, _, remedy = str(error).partition("; ")
    return CheckResult("launch", "FAIL", text, remedy)


def exit_status(results: Sequence[CheckResult]) -> int:
    """Return the exit status of the command: the code of the first failed check, or 0 if none failed.

    Not collective.
    """
    return next((int(result.code) for result in results if result.status == "FAIL"), 0)


#: Codes of terminals: green, yellow, bold red; cyan.
_COLOURS = {"ok": "32", "warn": "33", "FAIL": "1;31"}
_REMEDY = "36"


def report(results: Sequence[CheckResult], *, colour: bool = False) -> str:
    """Format the results as text for people.

    Not collective. With ``colour``, statuses and remedies are wrapped in escape sequences for terminals; the text is
    otherwise unchanged.
    """
    lines = []
    for result in results:
        status = _painted(f"{result.status:4}", _COLOURS[result.status], colour)
        lines.append(f"{status}  {result.name:13}  {result.text}")
        if result.remedy:
            lines.append(f"{'':4}  {'':13}  {_painted(f'-> {result.remedy}', _REMEDY, colour)}")
    return "\n".join(lines)


def _painted(text: str, codes: str, colour: bool) -> str:
    return f"\x1b[{codes}m{text}\x1b[0m" if colour else text


def as_json(results: Sequence[CheckResult], ranks: int) -> str:
    """Format the results as one line of JSON for programs; ``ranks`` is the number of ranks examined.

    Not collective.
    """
    checks: list[dict[str, Any]] = [asdict(result) | {"code": int(result.code)} for result in results]
    for entry in checks:
        if entry["status"] != "FAIL":
            del entry["code"]
    return json.dumps({"ok": exit_status(results) == 0, "ranks": ranks, "checks": checks})


#: Variables that change what a job computes or how it runs. All others stay out: launchers and sites keep keys in some.
_SETTINGS = re.compile(
    r"(OMP|OPENBLAS|MKL|NUMBA|KMP|UCX|FI|MPI4PY_RC|MPIR_CVAR|OMPI_MCA_(btl|coll|io|mtl|osc|pml|rmaps|mpi))_[A-Z_a-z0-9]+"
    r"|MPIZERO_(BLAS|CACHE_DIR|DEBUG|EMBEDDED|FAULT|TRACEBACK)|HDF5_USE_FILE_LOCKING|CUDA_VISIBLE_DEVICES"
)
_SLURM = re.compile(r"SLURM_(JOB_NUM_NODES|NTASKS|NTASKS_PER_NODE|CPUS_PER_TASK|TASKS_PER_NODE|MEM_PER_NODE|MPI_TYPE)")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|AUTH|URI", re.IGNORECASE)


def bug_report(comm: Communicator | None, results: Sequence[CheckResult], environment: Mapping[str, str]) -> str:
    """Return a fenced block of Markdown with the machine, the settings and the results.

    Collective over ``comm``, which is None if MPI does not see the job's other processes. Home folders, user names and
    host names are replaced. Only environment variables that are known settings are shown.
    """
    hosts = [machine.host()] if comm is None else comm.allgather_object(machine.host())
    nodes = list(dict.fromkeys(hosts))

    def hidden(text: str) -> str:
        for pattern, replacement in _replacements(nodes, environment):
            text = re.sub(pattern, replacement, text)
        return text

    size = 1 if comm is None else comm.size
    bad = {status: sum(result.status == status for result in results) for status in ("FAIL", "warn")}
    counts = ", ".join(f"{number} {status}" for status, number in bad.items() if number) or "all ok"
    facts = mpi_facts()
    lines = {
        "doctor": f"{counted(size, 'rank')} on {counted(len(nodes), 'node')}: {counts}",
        "system": platform.platform(),
        "processor": f"{machine.processor()}, {counted(len(machine.cores()), 'core')} of rank 0",
        "memory": f"{(available_memory() or 0) / 2**30:.1f} GiB available",
        "MPI": " ".join(facts.library.split()) if facts else "none",
        "launcher": Launch.of(environment).name or "none",
        "Slurm": _listed_settings(environment, _SLURM) or "none",
        "settings": _listed_settings(environment, _SETTINGS) or "none",
    }
    redacted = [replace(result, text=hidden(result.text), remedy=hidden(result.remedy)) for result in results]
    head = "\n".join(f"{name:9}  {hidden(text)}" for name, text in lines.items())
    return f"```text\n{head}\n\n{report(redacted)}\n```"


def _listed_settings(environment: Mapping[str, str], wanted: re.Pattern[str]) -> str:
    names = sorted(name for name in environment if wanted.fullmatch(name) and not _SECRET.search(name))
    return " ".join(f"{name}={environment[name]}" for name in names)


def _replacements(nodes: Sequence[str], environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of a pattern and its replacement: home folders first, because they contain user names."""
    users = {environment.get(name, "") for name in ("USER", "LOGNAME", "SLURM_JOB_USER")}
    homes = {environment.get("HOME", "").rstrip("/")}
    with suppress(KeyError):  # in a container, the user may have no entry
        account = pwd.getpwuid(os.getuid())
        users, homes = users | {account.pw_name}, homes | {account.pw_dir.rstrip("/")}
    for home in sorted(homes - {""}, key=len, reverse=True):
        yield rf"{re.escape(home)}(?=/|\W|$)", "~"
    for number, node in enumerate(nodes, 1):
        for name in dict.fromkeys((node, node.partition(".")[0])):
            yield rf"(?<![\w.-]){re.escape(name)}(?![\w-])", f"node-{number}"
    for user in sorted(users - {"", "root"}):
        yield rf"(?<![A-Za-z0-9]){re.escape(user)}(?![A-Za-z0-9])", "<user>"
