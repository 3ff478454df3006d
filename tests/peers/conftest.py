from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def script():
    """``gpt_twin``: a GPT in PyTorch, and batches of text."""
    from tests.peers import gpt_twin

    return gpt_twin
