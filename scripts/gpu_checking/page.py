"""Write the results of a check to docs/gpu.md: its first line, and its table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from harness.tables import between, markdown

from gpu_checking.parts import PARTS

#: The page's first line is in one pair of these marks, the table in another.
MARKS = {"first line": ("<!-- checked -->", "<!-- /checked -->"), "table": ("<!-- table -->", "<!-- /table -->")}
NOTHING = "**None of this has run on a real GPU yet.**"


def summary(found: dict[str, Any] | None) -> str:
    """Return the page's first line: what was checked, where and when; or that nothing was."""
    if found is None:
        return NOTHING
    rows = found["parts"]
    name = next((f["figure"] for row in rows for f in row["findings"] if f["name"] == "GPU"), "a GPU without a name")
    right = [row["part"] for row in rows if row["verdict"] == "ok"]
    others = [f"{row['part']} ({row['verdict']})" for row in rows if row["verdict"] != "ok"]
    told = f"**Checked on {name.split(',')[0]}, {found['began']}**: {len(right)} of {len(PARTS)} parts are right"
    return told + (f"; not {', '.join(others)}." if others else ".")


def table(found: dict[str, Any] | None) -> str:
    """Return the table of parts in Markdown, with what was found wrong below it."""
    if found is None:
        return markdown(("part", "seconds at most", "shows"), [(part.name, part.limit, part.shows) for part in PARTS])
    order = [part.name for part in PARTS]
    rows = sorted((row for row in found["parts"] if row["part"] in order), key=lambda row: order.index(row["part"]))
    cells = [(row["part"], f"{row['seconds']:.0f}", row["verdict"], _cell(row["figure"])) for row in rows]
    lines = [markdown(("part", "seconds", "verdict", "figure"), cells)]
    wrong = [(row["part"], f) for row in rows for f in row["findings"] if f["ok"] is False]
    lines += [""] * bool(wrong) + [f"- {part}: {_cell(f['name'])}: {_cell(f['figure'])}" for part, f in wrong]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def written(text: str, found: dict[str, Any] | None) -> str:
    """Return the text of the page with these results; None stands for none."""
    for mark, content in (("first line", summary(found)), ("table", table(found))):
        text = between(text, *MARKS[mark], content, "docs/gpu.md")
    return text


def write_page(page: Path, found: dict[str, Any]) -> int:
    """Write results to the page; end the script if they are those of a rehearsal. Return the exit status."""
    if found.get("rehearsal", True):
        sys.exit("these are the results of a rehearsal in the simulator: they say nothing of a GPU")
    page.write_text(written(page.read_text(encoding="utf-8"), found), encoding="utf-8")
    print(f"{page}: {summary(found)}")
    return 0
