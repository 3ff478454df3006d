"""Every public name has an example in its docstring, which runs and shows what its comments and outputs say."""

from __future__ import annotations

import contextlib
import doctest
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"

with mock.patch.object(sys, "path", [str(DOCS), *sys.path]):
    from generator.public_names import OF_OTHER_LIBRARIES, PublicName, public_modules, public_names

#: Modules whose names have no examples, and why.
WITHOUT = {}
#: Libraries of extras: where one is not installed, the examples that import it are skipped.
OF_EXTRAS = ("h5netcdf", "zarr")
#: Modules that this environment can import: tests/peers has the others.
MODULES = [module for module in public_modules() if module not in OF_OTHER_LIBRARIES]


def names_of(module: str, modules: list[str] = MODULES) -> list[PublicName]:
    """The names that have their page in a module: what several export belongs to the shortest of them."""
    names = public_names(modules).values()
    return [one for one in names if one.module == module and not isinstance(one.value, ModuleType)]


def examples_of(one: PublicName) -> list[doctest.DocTest]:
    """The doctests of a name and of its members; a constant has its examples in the docstring of its module."""
    constant = not isinstance(one.value, type) and not callable(one.value)
    value = sys.modules[one.module] if constant else one.value
    tests = doctest.DocTestFinder(recurse=not constant).find(value, one.full, module=False, globs={})
    return [test for test in tests if not constant or any(one.name in example.source for example in test.examples)]


def without_example(names: Iterable[PublicName]) -> list[str]:
    """Names whose docstring has no section of examples that shows at least one result."""
    return [
        one.full
        for one in names
        if not any(
            "Examples\n" in (test.docstring or "") and any(example.want or example.exc_msg for example in test.examples)
            for test in examples_of(one)
            if test.name == one.full
        )
    ]


def failures(names: Iterable[PublicName], folder: Path) -> list[str]:
    """The reports of all examples whose output is not the one that is written there, run in a folder of their own."""
    found: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    with contextlib.chdir(folder):
        for one in names:
            for test in examples_of(one):
                runner.run(test, out=found.append)
    return found


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_an_example_that_shows_a_result(module):
    missing = without_example(names_of(module))
    if module in WITHOUT:
        assert missing, f"{module} has all of its examples: take it out of WITHOUT"
    else:
        assert not missing, f"without an example: {missing}"


@pytest.mark.parametrize("module", [module for module in MODULES if module not in WITHOUT])
def test_the_examples_of_docstrings_give_the_outputs_that_they_show(module, tmp_path):
    lacking = [name for name in OF_EXTRAS if find_spec(name) is None]
    names = names_of(module)
    skipped = [one for one in names if any(f"import {name}\n" in (one.value.__doc__ or "") for name in lacking)]
    found = failures([one for one in names if one not in skipped], tmp_path)
    assert not found, "".join(found)
    if skipped:
        pytest.skip(f"{', '.join(one.full for one in skipped)}: {' and '.join(lacking)} not installed")


def test_an_example_that_shows_no_result_or_a_wrong_one_is_found(tmp_path):
    def silent():
        """Do nothing.

        Examples
        --------
        >>> one = 1
        """

    def wrong():
        """Do nothing.

        Examples
        --------
        >>> 1 + 1
        3
        """

    names = [PublicName("tests", given.__name__, given) for given in (silent, wrong)]
    assert without_example(names) == ["tests.silent"]
    assert len(failures(names, tmp_path)) == 1
