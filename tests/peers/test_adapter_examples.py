"""The examples in the docstrings of the adapters to PyTorch and JAX run and give the outputs that they show."""

from __future__ import annotations

import pytest

from tests.test_docstring_examples import OF_OTHER_LIBRARIES, failures, names_of, public_modules, without_example


@pytest.mark.parametrize("module", OF_OTHER_LIBRARIES)
def test_every_name_of_an_adapter_has_an_example_that_runs(module, tmp_path):
    for library in ("torch", "jax"):  # every module is imported
        pytest.importorskip(library)
    names = names_of(module, public_modules())
    assert names
    assert without_example(names) == []
    found = failures(names, tmp_path)
    assert not found, "".join(found)
