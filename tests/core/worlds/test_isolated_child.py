"""`bridge.core.worlds.isolated.child`: what a world's own process does before it has an environment."""

from __future__ import annotations

import sys

import pytest

from bridge.core.worlds.isolated import child
from bridge.errors import Code, RequestError


def test_a_limit_of_memory_is_refused_where_the_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    with pytest.raises(RequestError, match="max_world_bytes is not possible on this system") as caught:
        child._load(b"", None, 1 << 30)
    assert caught.value.code == Code.UNIMPLEMENTED
