"""`bridge.core.transport.address`: which token a client shows, and to whom."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bridge.core.transport.address import parse_address, shown_token
from bridge.core.transport.credentials import TOKEN_VARIABLE, ClientCredentials

SECRET = "correct-horse-battery-staple"


def test_the_environments_token_is_not_sent_in_the_clear_to_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def sent(url: str, **keywords: Any) -> str | None:
        return shown_token(dataclasses.replace(parse_address(url), credentials=ClientCredentials.of(**keywords)))

    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
    assert sent("grpc://gpu-box:1") is None
    assert sent("grpcs://gpu-box:1") == SECRET
    assert sent("grpc://localhost:1") == SECRET
    assert sent("unix:///run/s") == SECRET
    assert sent("dialed://localhost:1") is None  # a name that the server gave itself
    with pytest.warns(RuntimeWarning, match="travels unencrypted to gpu-box"):
        assert sent("grpc://gpu-box:1", token=SECRET) == SECRET
