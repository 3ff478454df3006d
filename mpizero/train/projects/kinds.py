"""Describe the kinds of projects that ``mpizero new`` writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: Layouts that a project's test compares with one process: of models of blocks, and of functions.
_BLOCKS, _FUNCTION = "zero3*2; pipeline=2", "zero1*4; ddp*2"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Describe one kind of project.

    Attributes
    ----------
    summary : str
        What it is, for a list of all kinds.
    about : str
        The first paragraph of its README.
    needs : str
        What must be installed beside mpizero, for its README.
    files : mapping of str to (str, str)
        By the name of a file of its own: the template's path, and what the README says of the file.
    layouts : str
        Layouts that its test compares.
    build : str
        The command that compiles it; "" if there is none.
    more : int
        Number of steps after which a resumed run might end.
    module, program : str
        A Python module and a program without which it does not run; "" if there is none.
    """

    summary: str
    about: str
    needs: str
    files: Mapping[str, tuple[str, str]]
    layouts: str = _BLOCKS
    build: str = ""
    more: int = 120
    module: str = ""
    program: str = ""


_MPIZERO = "You need an environment with mpizero, pytest and, for pictures, matplotlib"
_NETWORK = "the network; yours goes here"


def _files(kind: str, model: str, *, network: bool = False) -> dict[str, tuple[str, str]]:
    """Return the files of a project whose model the README describes as ``model``.

    Networks have settings, data and test in common: they tell points on spirals apart.
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
        needs=f"{_MPIZERO}.",
        files={
            "config.toml": ("gpt/config.toml", "model, text and training; your text goes here"),
            "test_model.py": ("gpt/test_model.py", "a test: the configuration can be trained"),
        },
    ),
    "torch": Kind(
        summary="a network written in PyTorch",
        about="A network of PyTorch that tells points on three spirals apart.",
        needs=f"{_MPIZERO}; for this project PyTorch, the extra `torch`.",
        files=_files("torch", _NETWORK, network=True),
        module="torch",
    ),
    "jax": Kind(
        summary="a network written in JAX",
        about="A network of JAX that tells points on three spirals apart.",
        needs=f"{_MPIZERO}; for this project JAX, the extra `jax`.",
        files=_files("jax", _NETWORK, network=True),
        module="jax",
    ),
    "fortran": Kind(
        summary="a program in Fortran with an adjoint, fitted to measurements",
        about="The conductivity of a rod is fitted to temperatures. Misfit and gradient are computed by Fortran.",
        needs=f"{_MPIZERO}; for this project gfortran, or another compiler named by `FC`.",
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
        needs=f"{_MPIZERO}.",
        files=_files("numpy", _NETWORK, network=True),
    ),
    "inversion": Kind(
        summary="an inverse problem: a field fitted to all measurements by L-BFGS within bounds",
        about="The conductivity of the ground is found from potentials that currents raise in it, by L-BFGS.",
        needs=f"{_MPIZERO}.",
        files=_files("inversion", "physics, misfit and adjoint; yours go here"),
        layouts=_FUNCTION,
        more=200,
    ),
}
