"""Versions of packages are found by the names of the folders that describe them, as importlib.metadata reads them."""

from __future__ import annotations

import sys
from importlib import metadata

from mpizero._util.text import installed_version


def test_a_version_is_the_one_that_the_description_says():
    for name in ("mpizero", "numpy", "threadpoolctl", "PyTest", "typing_extensions"):
        assert installed_version(name) == metadata.version(name)
    assert installed_version("a package that nobody made") is None


def test_the_first_folder_counts_and_eggs_are_known(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, described in (
        (first, "Some_Package-1.2.dist-info"),
        (second, "some_package-3.dist-info"),
        (second, "an_egg-4.5-py3.11.egg-info"),
        (second, "unversioned.egg-info"),
    ):
        (folder / described).mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(first), str(tmp_path / "missing"), str(second)])
    assert installed_version("some-package") == "1.2"
    assert installed_version("an-egg") == "4.5"
    assert installed_version("unversioned") is None
