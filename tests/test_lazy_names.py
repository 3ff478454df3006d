"""Names of packages: each leads to what it names, and its module is imported when it is first used."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import pytest

from mpizero._util.names import declared
from mpizero.errors import UnknownNameError

PACKAGES = [
    f"mpizero.{name}" for name in ("checkpoint", "comm", "data", "layout", "nn", "optim", "sharding", "testing")
]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_public_name_is_no_module_whatever_was_imported(package):
    module = import_module(package)
    for found in iter_modules(module.__path__, f"{package}."):
        import_module(found.name)
    assert not [name for name in module.__all__ if isinstance(getattr(module, name), ModuleType)]
    assert dir(module) == sorted(module.__all__)


@pytest.mark.parametrize("package", ["mpizero", *PACKAGES])
def test_every_name_that_a_package_imports_as_itself_is_public(package):
    tree = ast.parse(Path(import_module(package).__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    listed, unlisted = declared(package)
    assert [*listed] == import_module(package).__all__
    assert [a.name for node in imports for a in node.names if a.name == a.asname] == [*listed, *unlisted]
    assert package == "mpizero" or not unlisted


def test_the_package_lists_at_most_forty_names_by_topic_and_finds_some_more():
    import mpizero as mz

    assert mz.__all__[:5] == ["Mesh", "Config", "distribute", "Model", "FunctionModel"]
    assert mz.__all__[-1] == "testing"
    assert len(mz.__all__) <= 40
    unlisted = declared("mpizero")[1]
    assert set(unlisted) >= {"layout", "ShardingConfig", "HybridShardedOptimizer"}
    assert all(getattr(mz, name).__name__.rpartition(".")[2] == name for name in unlisted)
    assert dir(mz) == sorted(mz.__all__)


@pytest.mark.parametrize(
    ("name", "where"), [("TensorOptimizer", "optim"), ("measured_costs", "sharding"), ("Axes", "layout")]
)
def test_a_name_of_another_package_is_answered_by_where_it_is(name, where):
    import mpizero as mz

    with pytest.raises(UnknownNameError, match=rf"'mpizero' has no attribute '{name}': it is mz\.{where}\.{name}$"):
        getattr(mz, name)
    assert getattr(getattr(mz, where), name).__name__ == name


def test_the_name_of_a_module_is_no_public_name_and_says_which_one_may_be_meant():
    import mpizero as mz

    with pytest.raises(UnknownNameError, match=r"'mpizero.nn' has no public name 'layer'.*did you mean 'Layer'\?"):
        vars(mz.nn)["__getattr__"]("layer")  # other tests may have imported the module, which makes it an attribute
    with pytest.raises(UnknownNameError, match="a.b"):
        getattr(mz, "a.b")


@pytest.mark.slow
def test_a_module_is_imported_when_a_name_of_it_is_used_and_not_for_attributes_of_python():
    """Doctest and inspect ask every value of a namespace for such attributes, while they go through it."""
    code = """
import sys
import mpizero as mz
known = lambda: {name for name in ("numpy", "mpizero.nn", "mpizero.nn.models") if name in sys.modules}
assert known() == set(), known()
mz.nn
assert known() == {"mpizero.nn"}, known()
packages = [getattr(mz, name) for name in ("comm", "kernels", "errors")]
before = set(sys.modules)
assert not [one for one in [mz, *vars(mz).values(), mz.kernels.cpu] if hasattr(one, "__wrapped__")]
assert set(sys.modules) == before | {"mpizero.kernels.cpu"}, set(sys.modules) - before
assert mz.nn.MLP.__name__ == "MLP" and "mpizero.nn.models" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
