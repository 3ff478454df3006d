"""The built site: its links lead somewhere, it asks no network, its search finds things, and phones can show it."""

from __future__ import annotations

import re
from functools import cache
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
#: Pages that a browser opens: all guides, and of each other kind those with the widest words and signatures.
GUIDES = [path.relative_to(DOCS).with_suffix("").as_posix() for path in sorted(DOCS.glob("*.md"))]
OPENED = (
    *GUIDES,
    *("examples/waveform_inversion", "programs/examples/models/heat.f90", "search", "genindex"),
    *("reference/index", "reference/ShardingConfig", "reference/ShardedModelBase", "reference/nn", "reference/nn.GPT"),
)
#: What readers look for, and a page that must be among the first ten that are found.
SEARCHES = {
    "gradient accumulation": "concepts.html",
    "ZeRO": "data_parallelism.html",
    "checkpoint": "checkpoints.html",
    "Slurm": "slurm.html",
    "ShardingConfig": "reference/ShardingConfig.html",
}


#: A page with every fault that a browser can find.
FAULTY = """<body><script>console.error("planted"); fetch("http://127.0.0.1:2/planted").catch(() => 0)</script>
<img src="absent.png"><div style="width: 700px">wide</div></body>"""


@cache
def parts(page: Path) -> tuple[set[str], list[str], list[str]]:
    """A page's anchors, what it links, and what it loads."""
    text = page.read_text(encoding="utf-8")
    tags = re.findall(r"<(a|link|script|img|iframe|source)\b([^>]*)>", text)
    places = [(tag, unescape(m[1])) for tag, said in tags if (m := re.search(r'\b(?:href|src)="([^"]*)"', said))]
    links = [place for tag, place in places if tag == "a"]
    return set(re.findall(r'\bid="([^"]*)"', text)), links, [place for tag, place in places if tag != "a"]


def test_every_link_of_the_site_leads_to_a_page_and_an_anchor(site):
    wrong = []
    pages = sorted(site.rglob("*.html"))
    for page in pages:
        for place in parts(page)[1] + parts(page)[2]:
            if re.match(r"https?:|mailto:|data:", place):
                continue
            name, _, anchor = unquote(place).partition("#")
            there = page.parent / name.partition("?")[0] if name else page
            if not there.is_file():
                wrong.append(f"{page.relative_to(site)}: {place}")
            elif anchor and there.suffix == ".html" and anchor not in parts(there.resolve())[0]:
                wrong.append(f"{page.relative_to(site)}: {place} has no such anchor")
    assert len(pages) > 300
    assert not wrong, "\n".join(wrong)


def test_nothing_is_loaded_from_other_machines(site):
    loaded = {place for page in site.rglob("*.html") for place in parts(page)[2] if re.match(r"(https?:)?//", place)}
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert not loaded
    assert not re.findall(r"(?:url\(|@import )['\"]?(?:https?:)?//[^)]*", styles)


@pytest.mark.parametrize("name", OPENED)
def test_a_page_opens_from_a_folder_without_errors_and_fits_screens_of_all_widths(site, browser, name):
    assert not browser.faults(site / f"{name}.html")


def test_the_browser_finds_planted_faults(browser, tmp_path):
    (tmp_path / "faulty.html").write_text(FAULTY, encoding="utf-8")
    found = "\n".join(browser.faults(tmp_path / "faulty.html"))
    for fault in ("pixels wider than 400", "no picture", "'value': 'planted'", "asked http://127.0.0.1:2/planted"):
        assert fault in found


@pytest.mark.parametrize("words", SEARCHES)
def test_the_search_finds(site, browser, words):
    browser.open(site.resolve().as_uri() + f"/search.html?q={words.replace(' ', '+')}")
    links = "[...document.querySelectorAll('#search-results ul.search > li > a')].map(a => a.href)"
    browser.wait(f"{links}.length > 9 || /found/.test(document.querySelector('.search-summary')?.textContent)")
    pages = [re.sub(r"[?#].*", "", a).removeprefix(site.resolve().as_uri() + "/") for a in browser.evaluate(links)]
    assert SEARCHES[words] in pages[:10], pages
    assert not browser.said()
