"""What package managers and those who cite read is what setup.cfg says, as the script that writes it checks."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts" / "packaging"))
import generate  # noqa: E402

sys.path.remove(str(ROOT / "scripts" / "packaging"))


def test_recipes_and_citation_agree_with_setup_cfg_and_another_version_would_be_noticed(tmp_path, capsys):
    assert generate.main(["--check"]) == 0, capsys.readouterr().err
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    generate.write(tmp_path)
    text = (tmp_path / "setup.cfg").read_text(encoding="utf-8")
    (tmp_path / "setup.cfg").write_text(re.sub("(?m)^version = .*", "version = 99", text), encoding="utf-8")
    assert generate.main(["--check", "--root", str(tmp_path)]) == 1
    assert "CITATION.cff does not agree with setup.cfg" in capsys.readouterr().err
