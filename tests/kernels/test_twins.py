"""One formula, three folders: cpu, cuda and reference have the same files, kernels and parameters."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from pathlib import Path

import numpy as np
import pytest

from mpizero import kernels
from mpizero.kernels import cpu, cuda
from mpizero.kernels.cuda.launch import CudaKernel
from mpizero.kernels.jit import Kernel
from tests.kernels.cases import Draw, cases
from tests.support import reference

PACKAGES = {"cpu": cpu.__name__, "cuda": cuda.__name__, "reference": reference.__name__}


def files(folder):
    package = import_module(PACKAGES[folder])
    return {path.stem: path for path in Path(package.__file__).parent.glob("*.py") if not path.stem.startswith("_")}


def functions(path):
    """Public functions of a file -> names of their parameters, without scratch memory, which callers do not pass."""
    module = import_module(f"{PACKAGES[path.parent.name]}.{path.stem}")
    found = {name: value for name, value in vars(module).items() if not name.startswith("_") and callable(value)}
    own = {name: value for name, value in found.items() if getattr(value, "__module__", "") == module.__name__}
    return {name: list(signature(value).parameters) for name, value in own.items()}


def declared(path):
    """Public kernels of a file -> the types of their parameters, without scratch memory."""
    module = import_module(f"{PACKAGES[path.parent.name]}.{path.stem}")
    made = [k for k in vars(module).values() if isinstance(k, Kernel | CudaKernel) and k.__module__ == module.__name__]
    types = {k.name: k.signature.parameters[: len(signature(k).parameters)] for k in made}
    return {name: parameters for name, parameters in types.items() if not name.startswith("_")}


TOPICS = sorted(topic for topic, path in files("cpu").items() if declared(path))


def test_the_folders_have_the_same_files():
    assert set(files("reference")) == set(TOPICS)
    assert set(files("cuda")) - {"launch"} == set(TOPICS)


@pytest.mark.parametrize("topic", TOPICS)
def test_twins_have_the_same_names_and_parameters_and_a_case_each(topic):
    cpu, cuda, reference = (files(folder)[topic] for folder in PACKAGES)
    expected = {name: functions(cpu)[name] for name in declared(cpu)}
    for twin in (cuda, reference):
        assert {name: functions(twin).get(name) for name in expected} == expected
    assert set(declared(cuda)) <= set(expected)
    called = {case.kernel for case in cases(Draw(np.float32, 1, 1, 1, 1))}
    assert {f"{topic}.{name}" for name in expected} <= called, "each is compared with its twins in test_values.py"


@pytest.mark.parametrize("topic", TOPICS)
def test_twins_take_the_same_types(topic):
    cpu, cuda = (declared(files(folder)[topic]) for folder in ("cpu", "cuda"))
    assert cuda == {name: cpu[name] for name in cuda}


def test_the_namespaces_know_their_topics_and_no_others():
    assert kernels.cpu.layers.scale is not None
    with pytest.raises(AttributeError, match="has no module 'physics'"):
        _ = kernels.cpu.physics
    with pytest.raises(TypeError, match="got list"):
        kernels.backend([1.0])
