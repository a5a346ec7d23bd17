"""Where a game is served from."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[False, True], ids=["in_a_thread", "in_a_process"])
def process(request):
    """Whether the server is in a process of its own."""
    return request.param
