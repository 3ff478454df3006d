"""Text of others, fit for a terminal: nothing in it moves the cursor, ends a line, or hides; the rest stays."""

from __future__ import annotations

import json
import sys
import unicodedata

import pytest

from mpizero import errors
from mpizero._util.text import printable
from mpizero.checkpoint.atomic_folder import CheckpointIOError

ORDINARY = 'loss ä 漢字 ру 한국어 שלום हिन्दी 🙂 −≤∑ \u3000 a\\b "q"'
HOSTILE = "\x1b]0;t\x07\x1b[2J\r\n\t\x00\x7f\x9b31m\u202e\u2066\u2028\u2029\u200b\ufeff\ud800\U000e0041"


def test_ordinary_text_of_all_scripts_stays():
    assert printable(ORDINARY) == ORDINARY


def test_what_a_terminal_obeys_or_hides_is_escaped_as_in_json():
    shown = printable(HOSTILE)
    assert shown.isascii()
    assert shown.isprintable()
    assert shown.startswith("\\u001b]0;t\\u0007\\u001b[2J\\r\\n\\t\\u0000\\u007f\\u009b31m\\u202e")
    assert shown.endswith("\\ud800\\U000e0041")
    assert json.loads(f'"{printable(HOSTILE[:-1])}"') == HOSTILE[:-1]
    assert printable(shown) == shown


def test_no_character_is_left_that_could_do_harm():
    """Every code point there is: afterwards all are letters, marks, numbers, signs and spaces, and can be encoded."""
    everything = "".join(map(chr, (*range(0x30000), *range(0xE0000, sys.maxunicode + 1, 17))))  # between: nothing
    left = set(printable(everything))
    assert {unicodedata.category(c)[0] for c in left} == set("LMNPSZ")
    assert not left & set("\n\r\t\u2028\u2029\u202e\u2066\x7f\x85\x9b")
    "".join(left).encode()


def test_a_report_keeps_its_own_line_ends():
    assert printable("a\nb\tc", keep="\n") == "a\nb\\tc"


@pytest.mark.parametrize("kind", [errors.ConfigError, CheckpointIOError])
def test_every_deliberate_error_tells_what_it_quotes_in_printable_form(kind):
    told = str(kind(f"run/{HOSTILE}: {ORDINARY}"))
    assert told.replace("\n", "").isprintable() or "\u3000" in told
    assert "\x1b" not in told
    assert "\u202e" not in told
    assert ORDINARY in told
    told.encode()
