"""The words that the package no longer uses, and what it says instead: read by tests/test_structure.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: What is searched, relative to the repository's root.
SEARCHED = ("mpizero", "scripts", "docs", "examples", "README.md")


@dataclass(frozen=True)
class Retired:
    """A word that may not come back.

    Attributes
    ----------
    pattern : str
        Regular expression of the word, in lower case; identifiers are cut into their words before it is searched.
    use : str
        What to write instead.
    inside : tuple of str
        Path prefixes in which it is retired; everywhere it means something else, and may stay.
    but : str
        Regular expression of phrases in which it has its plain meaning.
    """

    pattern: str
    use: str
    inside: tuple[str, ...] = SEARCHED
    but: str = ""


RETIRED = (
    Retired("cards?", "device (of an array), GPU (in prose)"),
    Retired("workplaces?", "compute device"),
    Retired("couriers?", "pipeline p2p"),
    Retired("deal|deals|dealt|dealing", "assign (grains to ranks), redistribute (samples)", but="(great|good) deal"),
    Retired(
        "turns?",
        "segment (of an exchange)",
        inside=("mpizero/comm/reduce", "mpizero/sharding", "mpizero/tools/plan"),
        but=r"in turns?|takes? turns|turns? (\S+ ){1,3}(into|on|off)|turns? into",
    ),
    Retired(
        "spreads?",
        "parallel layout (of a model); range (of measurements)",
        inside=("mpizero/sharding", "mpizero/tools/plan", "mpizero/layout", "mpizero/comm", "mpizero/nn", "docs"),
        but=r"mean and spread|(to|is|are) spread|spread (out|over|evenly)|evenly spread",
    ),
    Retired("rolls?", "startup board", but="rolls? back"),
    Retired("lookouts?", "mismatch watcher", but="on the lookout"),
    Retired("elsewhere", "remote status", inside=("mpizero/guard",)),
    Retired("doors?", "status server", inside=("mpizero/comm",), but="only doors? to"),
    Retired("mirrors?|mirrored", "device copy, device parameters"),
    Retired(
        "rings?",
        "reduce-scatter buffer; ring is the word of ring attention",
        inside=("mpizero/sharding", "mpizero/tools/plan", "mpizero/comm", "mpizero/optim", "mpizero/checkpoint"),
        but="ring attention|ring self attention|attention ring",
    ),
    Retired(
        "behind",
        "overlapped with, during; after (in memory)",
        inside=("mpizero/sharding", "mpizero/tools/plan"),
        but="falls? behind|left behind",
    ),
    Retired("lend|lends|lent|lending|lender|lenders|borrowed|borrows?", "provide, view; unshard where sharded"),
    Retired("lastwords|libraryexit", "failure report, C exit hook"),
    Retired("subjects?", "model under test", inside=("mpizero/train", "mpizero/comm")),
    Retired("faces|hands|manners?", "interface, kinds, behaviour", but=r"hands (over|out|it|them|on)|hands its"),
    Retired("watching", "tracing"),
    Retired(
        "answers?",
        "return value",
        inside=("mpizero/sharding", "mpizero/tools/check_model", "mpizero/tools/plan"),
        but="right answers|(same|s) answer",
    ),
    Retired("dearest|at hand|(on|under) (its|their) way", "plain words: most costly, stored, available, in flight"),
    Retired("settle|settles|settled|settling", "agree, choose, wait, resolve, finish or free: say which"),
    Retired("offers?", "what it is", inside=("mpizero/sharding/batch",)),
    Retired("whoever|whomever", "the rank that, callers that, ..."),
    Retired("wish|wishes", "request", but="if you wish"),
    Retired("waves?", "round (of grains)", inside=("mpizero/sharding", "mpizero/tools/plan", "mpizero/layout")),
    Retired("publish|publishes|published", "all-gather (of parameters)", inside=("mpizero/sharding",)),
    Retired("pristine|farewells?|misfit axes|half loaded", "is initial, incompatible, partially loaded"),
    Retired("(status|startup) boards?|board slots?", "status table, record"),
    Retired("peer (ranks|groups?)|node claims", "ranks of the inter-node group, dynamic scheduler"),
    Retired("watched jobs?", "checked micro-batch"),
    Retired("beholder|lap|hall|errand|errands|dwell|dwells", "plain words"),
)


def words_of(text: str) -> str:
    """Return a text in lower case, its identifiers cut into their words."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_+", " ", text).lower()


def files(root: Path) -> Iterator[Path]:
    """Yield every file that is searched."""
    for name in SEARCHED:
        place = root / name
        found = sorted(place.rglob("*")) if place.is_dir() else [place]
        yield from (path for path in found if path.suffix in {".py", ".md", ".sh", ".toml"})


def uses(root: Path) -> dict[str, list[str]]:
    """Return the lines that use each retired pattern, as ``path:number: text``."""
    found: dict[str, list[str]] = {word.pattern: [] for word in RETIRED}
    any_word = re.compile(rf"\b({'|'.join(word.pattern for word in RETIRED)})\b")
    for path in files(root):
        name, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        said, lines = words_of(text), text.split("\n")
        if not any_word.search(said):  # most files: one search in place of one for each word
            continue
        for word in RETIRED:
            if not name.startswith(word.inside):
                continue
            plain = re.sub(word.but, lambda phrase: "-" * len(phrase[0]), said) if word.but else said
            numbers = sorted(
                {plain.count("\n", 0, use.start()) for use in re.finditer(rf"\b({word.pattern})\b", plain)}
            )
            found[word.pattern] += [f"{name}:{number + 1}: {lines[number].strip()}" for number in numbers]
    return found
