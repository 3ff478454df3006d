"""Find the versions of installed packages by the names of their folders, without ``importlib.metadata``.

Importing that takes 30 ms of processor time, because it imports parsers of mail and archives: of 64 ranks on two cores
a second. Installers name the folder that describes a package after its name and version (PEP 376).
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from functools import cache


def installed_version(name: str) -> str | None:
    """Return the version of the package ``name``, or None if it is not installed. Not collective.

    Examples
    --------
    >>> from mpizero.installed import installed_version
    >>> import numpy
    >>> installed_version("numpy") == numpy.__version__
    True
    """
    return _versions(tuple(sys.path)).get(_normalized(name))


def own_version() -> str:
    """Return the version of this library, or "0+unknown" in a source tree that is not installed. Not collective."""
    return installed_version("mpizero") or "0+unknown"


@cache
def _versions(folders: tuple[str, ...]) -> dict[str, str]:
    """Return the version of each package that is described in one of ``folders``; the first one counts."""
    found: dict[str, str] = {}
    for folder in folders:
        with suppress(OSError):
            for entry in os.listdir(folder or "."):
                described, kind = os.path.splitext(entry)
                if kind in (".dist-info", ".egg-info") and "-" in described:
                    name, version = described.split("-")[:2]
                    found.setdefault(_normalized(name), version)
    return found


def _normalized(name: str) -> str:
    """Return the form of a package's name in which all spellings of it are equal (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
