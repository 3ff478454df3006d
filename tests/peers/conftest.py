from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "compare_torch.py"


@pytest.fixture(scope="session")
def script():
    """``scripts/compare_torch.py``: a GPT in PyTorch, and batches of text."""
    spec = importlib.util.spec_from_file_location("compare_torch", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
