from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.site.browser import started

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def site() -> Path:
    """The folder of the site, which ``scripts/test.sh --only site`` has built."""
    pytest.importorskip("sphinx", reason="needs the site's environment, which scripts/test.sh makes")
    folder = ROOT / "build" / "site"
    assert (folder / "index.html").exists(), "python -m sphinx -W --keep-going -b html docs build/site"
    return folder


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium: ``faults(page)``, or ``open`` and ``evaluate`` (``tests/site/browser.py``)."""
    # Elsewhere Chromium may just be being installed, by another part of the suite.
    pytest.importorskip("sphinx", reason="needs the site's environment, which scripts/test.sh makes")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("there is no Chromium")
    with started(program) as running:
        yield running
