"""Format what ``mpizero doctor`` has found for a report of a fault: one block to copy, without names of persons."""

from __future__ import annotations

import os
import platform
import pwd
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from mpizero._util.launch import Launch
from mpizero.comm import Communicator
from mpizero.comm.startup import available_memory
from mpizero.train import machine
from mpizero.train.doctor import examination
from mpizero.train.doctor.check_result import CheckResult, counted

#: Variables that change what a job computes or how it runs. All others stay out: launchers and sites keep keys in some.
_SETTINGS = re.compile(
    r"(OMP|OPENBLAS|MKL|NUMBA|KMP|UCX|FI|MPI4PY_RC|MPIR_CVAR|OMPI_MCA_(btl|coll|io|mtl|osc|pml|rmaps|mpi))_[A-Z_a-z0-9]+"
    r"|MPIZERO_(BLAS|CACHE_DIR|DEBUG|EMBEDDED|FAULT|TRACEBACK)|HDF5_USE_FILE_LOCKING|CUDA_VISIBLE_DEVICES"
)
_SLURM = re.compile(r"SLURM_(JOB_NUM_NODES|NTASKS|NTASKS_PER_NODE|CPUS_PER_TASK|TASKS_PER_NODE|MEM_PER_NODE|MPI_TYPE)")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|AUTH|URI", re.IGNORECASE)


def bug_report(comm: Communicator | None, results: Sequence[CheckResult], environment: Mapping[str, str]) -> str:
    """Return a fenced block of Markdown with the machine, the settings and the results.

    Collective over ``comm``; None stands for a process whose MPI does not see the others. Home folders, user names and
    host names are replaced. Of the environment only variables are shown that are known to be settings.
    """
    hosts = [machine.host()] if comm is None else comm.allgather_object(machine.host())
    nodes = list(dict.fromkeys(hosts))

    def hidden(text: str) -> str:
        for pattern, replacement in _replacements(nodes, environment):
            text = re.sub(pattern, replacement, text)
        return text

    size = 1 if comm is None else comm.size
    bad = {status: sum(result.status == status for result in results) for status in ("FAIL", "warn")}
    found = ", ".join(f"{number} {status}" for status, number in bad.items() if number) or "all ok"
    facts = machine.mpi_facts()
    lines = {
        "doctor": f"{counted(size, 'rank')} on {counted(len(nodes), 'node')}: {found}",
        "system": platform.platform(),
        "processor": f"{machine.processor()}, {counted(len(machine.cores()), 'core')} of rank 0",
        "memory": f"{(available_memory() or 0) / 2**30:.1f} GiB available",
        "MPI": " ".join(facts.library.split()) if facts else "none",
        "launcher": Launch.of(environment).name or "none",
        "Slurm": _shown(environment, _SLURM) or "none",
        "settings": _shown(environment, _SETTINGS) or "none",
    }
    told = [replace(result, text=hidden(result.text), remedy=hidden(result.remedy)) for result in results]
    head = "\n".join(f"{name:9}  {hidden(text)}" for name, text in lines.items())
    return f"```text\n{head}\n\n{examination.report(told)}\n```"


def _shown(environment: Mapping[str, str], wanted: re.Pattern[str]) -> str:
    names = sorted(name for name in environment if wanted.fullmatch(name) and not _SECRET.search(name))
    return " ".join(f"{name}={environment[name]}" for name in names)


def _replacements(nodes: Sequence[str], environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield what is replaced, as a pattern, and by what: homes first, for they contain names of users."""
    users, homes = (
        [environment.get(name, "") for name in ("USER", "LOGNAME", "SLURM_JOB_USER")],
        [environment.get("HOME")],
    )
    with suppress(KeyError):  # in a container, the user may have no entry
        own = pwd.getpwuid(os.getuid())
        users, homes = [*users, own.pw_name], [*homes, own.pw_dir]
    for home in sorted({home.rstrip("/") for home in homes if home}, key=len, reverse=True):
        if home:
            yield rf"{re.escape(home)}(?=/|\W|$)", "~"
    for number, node in enumerate(nodes, 1):
        for name in dict.fromkeys((node, node.partition(".")[0])):
            yield rf"(?<![\w.-]){re.escape(name)}(?![\w-])", f"node-{number}"
    for user in sorted(set(users) - {"", "root"}):
        yield rf"(?<![A-Za-z0-9]){re.escape(user)}(?![A-Za-z0-9])", "<user>"
