"""Packages of others, as pip installs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.server.plugged import WORLDS, Install
from tests.packages import installer


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Lay out packages: `install(package, group, names, **modules)`, with a group of this package's entry points."""

    def lay_out(package: str, group: str, names: dict[str, str], **modules: str) -> None:
        installer(tmp_path, monkeypatch, f"gymnasium_bridge.{group}")(package, names, **modules)

    return lay_out


@pytest.fixture
def worlds(install: Install) -> None:
    """The protocol of the page on plugins, installed."""
    install("bridge-worlds", "protocols", {"worlds": "bridge_worlds:PROTOCOL"}, bridge_worlds=WORLDS)
