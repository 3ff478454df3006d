from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def script():
    """``twins``: a GPT in PyTorch, and batches of text."""
    from tests.peers import twins

    return twins
