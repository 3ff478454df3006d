"""The table of scripts/README.md has a row for every script, and every script has the reader that its row names."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
ROWS = dict(
    re.findall(r"^\| \[.*\]\((.*)\) \|.*\| `([^`|]*)` \|[^|]*\|$", (SCRIPTS / "README.md").read_text(), re.MULTILINE)
)


def test_every_script_has_a_row():
    """A folder with ``__init__.py`` has parts of a script, the folders of package managers what one has written."""
    found = [p for p in SCRIPTS.rglob("*.*") if p.suffix in (".py", ".sh", ".sbatch") and p.parent.name != "spack"]
    assert {str(p.relative_to(SCRIPTS)) for p in found if not p.with_name("__init__.py").exists()} == set(ROWS)


def test_every_script_is_named_by_its_reader():
    missing = [script for script, reader in ROWS.items() if Path(script).name not in (ROOT / reader).read_text()]
    assert not missing
