"""Where a game is served from."""

from __future__ import annotations

import pytest


# `make test` has those of a process that tests/game/test_process.py and others start themselves.
@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["in_a_thread", "in_a_process"])
def process(request):
    """Whether the server is in a process of its own."""
    return request.param
