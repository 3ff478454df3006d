"""Names of packages: each leads to what it names, and its module is imported when it is first used."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

import pytest

PACKAGES = [f"mpizero.{name}" for name in ("checkpoint", "data", "nn", "optim", "parallel", "testing")]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_public_name_is_no_module_whatever_was_imported(package):
    module = import_module(package)
    for found in iter_modules(module.__path__, f"{package}."):
        import_module(found.name)
    assert not [name for name in module.__all__ if isinstance(getattr(module, name), ModuleType)]
    assert dir(module) == sorted(module.__all__)


def test_a_module_is_imported_when_a_name_of_it_is_used():
    code = """
import sys
import mpizero as mz
known = lambda: {name for name in ("numpy", "mpizero.nn", "mpizero.nn.models.mlp") if name in sys.modules}
assert known() == set(), known()
mz.nn
assert known() == {"numpy", "mpizero.nn"}, known()
assert mz.nn.MLP.__name__ == "MLP" and "mpizero.nn.models.mlp" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
