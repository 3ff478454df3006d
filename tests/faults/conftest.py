"""What starts the jobs of these tests."""

from __future__ import annotations

import pytest

from tests.faults.jobs import launchers


@pytest.fixture(params=launchers(), ids=lambda pair: pair[0])
def launcher(request):
    return request.param
