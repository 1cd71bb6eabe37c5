"""What the ranks of a test module made of its scenarios."""

from __future__ import annotations

import pytest
from scenarios import Outcomes


@pytest.fixture(scope="module")
def outcomes(request):
    """The outcomes of the scenarios in the module's `SCENARIOS`, all run when the first is asked for."""
    return Outcomes(request.module)
