"""Write a project of one of the kinds into a new folder."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import string
import tempfile
from importlib import resources
from pathlib import Path

from mpizero._util.checks import home_path
from mpizero.errors import ConfigError
from mpizero.train.projects.kinds import KINDS, Kind

#: How ranks of each MPI are started under Slurm: srun's option, and a comment on it.
_MPI = {
    "MPICH": ("pmi2", "MPICH's wheel, too. Its own launcher would be: SLURM_MPI_TYPE=none mpiexec ..."),
    "Open MPI": ("pmix", "Where `srun --mpi=list` does not name pmix: mpiexec ..."),
}

#: The first commands in a new project, whatever its kind.
FIRST_COMMANDS = ("python -m pytest -q", "python -m mpizero train config.toml")


class _Template(string.Template):
    """Replace ``%%name``: shell scripts are full of ``$``."""

    delimiter = "%%"


def new_project(folder: str | Path, kind: str) -> Path:
    """Write a project of the kind named ``kind`` into ``folder``, which must be new or empty; return its path.

    Nothing is left behind if that fails. Not collective.

    Raises
    ------
    ConfigError
        If there is no such kind, or something is in the folder.
    OSError
        If the folder cannot be written.
    """
    if kind not in KINDS:
        raise ConfigError(f"--kind {kind}: there is no such kind of project; {choices()}")
    target = home_path(folder).absolute()
    _check_free(target)
    there = target.is_dir()
    if not there:
        target.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target if there else target.parent))
    try:
        _write(beside, KINDS[kind], re.sub(r"[^\w.-]+", "-", target.name))
        if there:  # the folder stays the one that a shell may stand in, with its permissions
            for path in beside.iterdir():
                path.rename(target / path.name)
            beside.rmdir()
        else:
            mask = os.umask(0)
            os.umask(mask)
            beside.chmod(0o777 & ~mask)  # that of mkdtemp is for one user alone
            beside.rename(target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return target


def _check_free(target: Path) -> None:
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise ConfigError(f"{target}: is no folder; name a new one")
    if there := sorted(path.name for path in target.iterdir()):
        shown = ", ".join(there[:5]) + (", ..." if len(there) > 5 else "")
        raise ConfigError(f"{target}: is not empty ({shown}); name a new folder, nothing has been written")


def _write(folder: Path, kind: Kind, name: str) -> None:
    words = {
        "name": name,
        "about": kind.about,
        "needs": kind.needs,
        "build": kind.build,
        "layouts": kind.layouts,
        "more": str(kind.more),
        "files": "\n".join(f"| `{file}` | {what} |" for file, (_, what) in kind.files.items()),
    }
    files = {file: _text(path) for file, (path, _) in kind.files.items()}
    files["test_layouts.py"] = _filled("common/test_layouts.py", words)
    files[".gitignore"] = _text("common/gitignore")
    files["README.md"] = _filled("common/README.md", words).replace("```sh\n\n", "```sh\n")  # where nothing is built
    for mpi, (pmi, launcher) in _MPI.items():
        job = f"job_{mpi.replace(' ', '').lower()}.sbatch"
        files[job] = _filled("common/job.sbatch", {**words, "mpi": mpi, "pmi": pmi, "launcher": launcher, "job": job})
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")


def _text(path: str) -> str:
    return resources.files(__package__).joinpath("templates", f"{path}.in").read_text(encoding="utf-8")


def _filled(path: str, words: dict[str, str]) -> str:
    return _Template(_text(path)).substitute(words)


def choices() -> str:
    """Return the names of the kinds, and where they are described, in words for an error."""
    return f"there are {', '.join(KINDS)} (mpizero new --help describes them)"


def listed() -> str:
    """Return a line for each kind."""
    width = max(map(len, KINDS))
    return "\n".join(f"  {name:<{width}}  {kind.summary}" for name, kind in KINDS.items())


def missing(kind: str) -> list[str]:
    """Return a sentence about each thing that a kind of project needs and that is not installed."""
    module, program = KINDS[kind].module, KINDS[kind].program
    told = []
    if module and importlib.util.find_spec(module) is None:
        told.append(f"it needs {module}, which is not installed: pip install 'mpizero[{module}]'")
    if program and shutil.which(program) is None:
        told.append(f"it needs {program}, which is not installed, or another compiler: FC=... sh build.sh")
    if importlib.util.find_spec("pytest") is None:
        told.append("its tests need pytest, which is not installed: pip install pytest")
    return told
