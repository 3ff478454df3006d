"""Find out how much memory this process may still take: of the node, of its control groups, of its job."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

#: Files of a control group by version: the limit, the memory in use, and the names of what the kernel drops when it
#: needs room. Version 1 counts groups below in the figures that begin with "total".
_FILES = {
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}
#: Limits of version 1 from here on mean none.
_NONE = 1 << 60


def available_memory(proc: str = "/proc", environment: Mapping[str, str] = os.environ) -> int | None:
    """Return how many bytes this process may still take, as far as the system says; None if it says nothing.

    That is what the node has available, but no more than what is left below the limits of the control groups of this
    process and of all above them (containers, ``--mem`` of Slurm), nor below the limit that Slurm has told the job.
    The page cache does not count as taken, because the kernel drops it. Not collective.
    """
    found = [*_of_node(Path(proc)), *_of_groups(Path(proc)), *_of_slurm(Path(proc), environment)]
    return max(0, min(found)) if found else None


def memory_of_node() -> int | None:
    """Return how many bytes the node has available, for all of its processes; None if unknown. Not collective."""
    return next(_of_node(Path("/proc")), None)


def _of_node(proc: Path) -> Iterator[int]:
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _of_groups(proc: Path) -> Iterator[int]:
    """Yield what each control group with a limit leaves, from the one of this process up to the topmost one."""
    for version, top, own in _memory_groups(proc):
        limit_name, used_name, dropped = _FILES[version]
        folder = top / own
        while True:
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and used is not None and limit < _NONE:
                told = dict(line.split() for line in _lines(folder / "memory.stat") if line.count(" ") == 1)
                yield limit - used + sum(int(told.get(name, 0)) for name in dropped)
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent


def _memory_groups(proc: Path) -> Iterator[tuple[int, Path, str]]:
    """Yield version, mount point and place below it of each hierarchy of control groups that limits memory."""
    own: dict[int, str] = {}
    for line in _lines(proc / "self" / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            own[2] = path
        elif "memory" in controllers.split(","):
            own[1] = path
    for line in _lines(proc / "self" / "mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        version = 2 if kinds[0] == "cgroup2" else 1 if kinds[0] == "cgroup" and "memory" in kinds[2].split(",") else 0
        if version in own:
            root, place = fields[3].rstrip("/"), own[version]  # a container may see a part of the hierarchy only
            below = place.removeprefix(root) if place.startswith(root) else ""
            yield version, Path(re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), fields[4])), below.strip("/")


def _of_slurm(proc: Path, environment: Mapping[str, str]) -> Iterator[int]:
    """Yield what is left of the memory that Slurm has given the job on this node, if each of its ranks has as much.

    Slurm may only watch it, and not limit it by a control group.
    """
    each = _whole(environment.get("SLURM_MEM_PER_CPU")) * _whole(environment.get("SLURM_CPUS_ON_NODE"))
    granted = _whole(environment.get("SLURM_MEM_PER_NODE")) or each
    fields = next(_lines(proc / "self" / "statm"), "").split()
    if granted and len(fields) > 1:
        tasks = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
        resident = int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
        yield (granted << 20) - resident * (int(tasks[0]) if tasks else 1)


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


def _number(path: Path) -> int | None:
    text = next(_lines(path), "")
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> Iterator[str]:
    try:
        yield from path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # another system, or a file that this user may not read
        return
