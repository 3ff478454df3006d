"""Write a project, of one of several kinds, into a new folder, for ``mpizero new``.

:data:`KINDS` describes the kinds of projects, and :func:`new_project` writes one, from templates.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import string
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from mpizero._util.checks import home_path
from mpizero.errors import ConfigError

#: Layouts that a project's test compares with one process: for models of blocks, and for functional models.
_BLOCKS, _FUNCTION = "zero3*2; pipeline=2", "zero1*4; ddp*2"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Describe one kind of project.

    Attributes
    ----------
    summary : str
        Short description, for a list of all kinds.
    about : str
        First paragraph of the project's README.
    needs : str
        Text for the README that names requirements besides mpizero, pytest and matplotlib; "" if there are none.
    files : mapping of str to (str, str)
        By name, the files besides those that every project has, such as the README: for each file the path of its
        template, and its description in the README.
    layouts : str
        Parallel layouts that the project's test compares.
    build : str
        Command that compiles the project's program; "" if there is none.
    more : int
        Total number of steps in the README's example of resuming a run.
    cut : str
        Options, with a blank before them, that the README appends to its commands that train on several ranks.
    module, program : str
        Python module and program that the project needs; "" if it needs none.
    """

    summary: str
    about: str
    needs: str = ""
    files: Mapping[str, tuple[str, str]]
    layouts: str = _BLOCKS
    build: str = ""
    more: int = 120
    cut: str = ""
    module: str = ""
    program: str = ""


_MPIZERO = "You need an environment with mpizero, pytest and, for pictures, matplotlib"
_NETWORK = "the network; yours goes here"


def _files(kind: str, model: str, *, network: bool = False) -> dict[str, tuple[str, str]]:
    """Return the files of a project; ``model`` is the text by which the README describes the file model.py.

    Projects with a ``network`` share settings, data and test: they classify points on spirals.
    """
    settings, data, test = (
        ("common/network.toml", "common/spirals.py", "common/test_network.py")
        if network
        else (f"{kind}/config.toml", f"{kind}/data.py", f"{kind}/test_model.py")
    )
    return {
        "config.toml": (settings, "what is trained, on what, and how"),
        "model.py": (f"{kind}/model.py", model),
        "data.py": (data, "the samples; yours go here"),
        "test_model.py": (test, "a test: gradient, sums, bits of the model"),
    }


KINDS: Mapping[str, Kind] = {
    "gpt": Kind(
        summary="a language model on text files, from a configuration alone",
        about="A small GPT that learns to write Python, byte by byte. `python -m mpizero generate run` lets it write.",
        files={
            "config.toml": ("gpt/config.toml", "model, text and training; your text goes here"),
            "test_model.py": ("gpt/test_model.py", "a test: the configuration can be trained"),
        },
    ),
    "torch": Kind(
        summary="a network written in PyTorch",
        about="A network of PyTorch that tells points on three spirals apart.",
        needs="; for this project PyTorch, the extra `torch`",
        files=_files("torch", _NETWORK, network=True),
        module="torch",
    ),
    "jax": Kind(
        summary="a network written in JAX",
        about="A network of JAX that tells points on three spirals apart.",
        needs="; for this project JAX, the extra `jax`",
        files=_files("jax", _NETWORK, network=True),
        module="jax",
    ),
    "fortran": Kind(
        summary="a program in Fortran with an adjoint, fitted to measurements",
        about="The conductivity of a rod is fitted to temperatures. Misfit and gradient are computed by Fortran.",
        needs="; for this project gfortran, or another compiler named by `FC`",
        files={
            **_files("fortran", "calls the program, and makes it a model"),
            "heat.f90": ("fortran/heat.f90", "the program; yours goes here"),
            "build.sh": ("fortran/build.sh", "compiles it"),
        },
        layouts=_FUNCTION,
        build="sh build.sh",
        program="gfortran",
    ),
    "numpy": Kind(
        summary="layers of your own in NumPy, with a backward pass",
        about="A network with a layer written in NumPy that tells points on three spirals apart.",
        files=_files("numpy", _NETWORK, network=True),
    ),
    "inversion": Kind(
        summary="an inverse problem: a field fitted to all measurements by L-BFGS within bounds",
        about="The conductivity of the ground is found from potentials that currents raise in it, by L-BFGS.",
        files=_files("inversion", "physics, misfit and adjoint; yours go here"),
        layouts=_FUNCTION,
        more=200,
    ),
    "field": Kind(
        summary="fields on a grid, whose space may be cut over ranks",
        about="A U-Net, or a Fourier neural operator, learns where a wind carries a field on a periodic grid. Where\n"
        "`[parallel] domain` is `[2, 2]`, four ranks share every sample, and each computes one box of its space.",
        files=_files("field", _NETWORK),
        layouts="domain=2x1; domain=2x2",
        cut=" --set 'parallel.domain=[2,2]'",
    ),
}
#: How ranks of each MPI are started under Slurm: srun's option, and a comment on it.
_MPI = {
    "MPICH": ("pmi2", "MPICH's wheel, too. Its own launcher would be: SLURM_MPI_TYPE=none mpiexec ..."),
    "Open MPI": ("pmix", "Where `srun --mpi=list` does not name pmix: mpiexec ..."),
}

#: The first commands in a new project, whatever its kind.
FIRST_COMMANDS = ("python -m pytest -q", "python -m mpizero train config.toml")


class _Template(string.Template):
    """Substitute ``%%name`` in place of ``$name``, because shell scripts are full of ``$``."""

    delimiter = "%%"


def new_project(folder: str | Path, kind: str) -> Path:
    """Write a project of the kind named ``kind`` into ``folder``, which must be new or empty; return its path.

    Files are written to a temporary folder first, which is removed if writing fails. Not collective.

    Raises
    ------
    ConfigError
        If there is no such kind, or the folder is not empty.
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
        if there:  # keep the folder itself: it may be a shell's working directory, and has permissions
            for path in beside.iterdir():
                path.rename(target / path.name)
            beside.rmdir()
        else:
            mask = os.umask(0)
            os.umask(mask)
            beside.chmod(0o777 & ~mask)  # mkdtemp's permissions are for one user only
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
        names = ", ".join(there[:5]) + (", ..." if len(there) > 5 else "")
        raise ConfigError(f"{target}: is not empty ({names}); name a new folder, nothing has been written")


def _write(folder: Path, kind: Kind, name: str) -> None:
    words = {
        "name": name,
        "about": kind.about,
        "needs": f"{_MPIZERO}{kind.needs}.",
        "build": kind.build,
        "layouts": kind.layouts,
        "more": str(kind.more),
        "cut": kind.cut,
        "files": "\n".join(f"| `{file}` | {what} |" for file, (_, what) in kind.files.items()),
    }
    files = {file: _text(path) for file, (path, _) in kind.files.items()}
    files["test_layouts.py"] = _filled("common/test_layouts.py", words)
    files[".gitignore"] = _text("common/gitignore")
    files["README.md"] = _filled("common/README.md", words).replace("```sh\n\n", "```sh\n")  # without a build command
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
    """Return a phrase for error messages: the names of all kinds, and the command that describes them."""
    return f"there are {', '.join(KINDS)} (mpizero new --help describes them)"


def listed() -> str:
    """Return lines of text with the name and the summary of each kind of project."""
    width = max(map(len, KINDS))
    return "\n".join(f"  {name:<{width}}  {kind.summary}" for name, kind in KINDS.items())


def missing(kind: str) -> list[str]:
    """Return a sentence about each thing that a kind of project needs and that is not installed."""
    module, program = KINDS[kind].module, KINDS[kind].program
    messages = []
    if module and importlib.util.find_spec(module) is None:
        messages.append(f"it needs {module}, which is not installed: pip install 'mpizero[{module}]'")
    if program and shutil.which(program) is None:
        messages.append(f"it needs {program}, which is not installed, or another compiler: FC=... sh build.sh")
    if importlib.util.find_spec("pytest") is None:
        messages.append("its tests need pytest, which is not installed: pip install pytest")
    return messages
