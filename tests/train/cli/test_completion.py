"""What ``mpizero completion`` prints completes commands, options, files and settings in real shells."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from mpizero.cli.commands import settings
from mpizero.errors import ExitStatus
from tests.train.conftest import PATIENCE

#: What is typed, and some of what is offered then.
TYPED = [
    ("mpizero tra", {"train"}),
    ("mpizero bench st", {"step"}),
    ("mpizero train --res", {"--resume", "--resume-from"}),
    ("mpizero train ti", {"tiny.toml"}),
    ("mpizero plan tiny.toml --set train.ste", {"train.steps="}),
    ("mpizero completion f", {"fish"}),
]
#: Each shell's own way to tell what it would offer for the words after the script; one line each.
ASK = {
    "bash": """
. "$1"; read -ra COMP_WORDS <<<"$2"; COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); compopt() { :; }
registered=$(complete -p mpizero | sed 's/.* -F \\([^ ]*\\) .*/\\1/')
"$registered" mpizero "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
""",
    "fish": 'source $argv[1]; complete -C "$argv[2]" | string split -f 1 \\t; or true',
}


def offered(shell: str, script: str, line: str, folder: str) -> set[str]:
    """What a shell offers for a line."""
    before = ["-c", ASK[shell], "bash"] if shell == "bash" else ["--no-config", "-c", ASK[shell]]
    told = subprocess.check_output([shell, *before, script, line], cwd=folder, text=True, timeout=PATIENCE)
    return set(told.split())


@pytest.mark.parametrize("shell", list(ASK))
def test_a_shell_completes_the_command_line(on_threads, shell):
    if not shutil.which(shell):
        pytest.skip(f"there is no {shell}")
    outcome = on_threads(1, "completion", shell)
    (on_threads.folder / "script").write_text(outcome.out)
    for line, words in TYPED:
        assert words == offered(shell, "./script", line, on_threads.folder), line


def test_a_script_for_zsh_is_one_that_zsh_can_read(on_threads):
    if not shutil.which("zsh"):
        pytest.skip("there is no zsh")
    (on_threads.folder / "_mpizero").write_text(on_threads(1, "completion", "zsh").out)
    subprocess.run(["zsh", "-n", "_mpizero"], cwd=on_threads.folder, check=True, timeout=PATIENCE)


def test_settings_of_every_section_are_offered():
    assert {"model.dim=", "data.hdf5=", "parallel.tensor=", "train.steps=", "optimizer.lr=", "checkpoint.keep="} <= set(
        settings()
    )


def test_without_shtab_the_error_says_how_to_get_it(on_threads, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    outcome = on_threads(1, "completion", "bash", status=ExitStatus.CONFIG)
    assert "pip install 'mpizero[completion]'" in outcome.err
