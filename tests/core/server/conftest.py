"""Packages of others, as pip installs them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.core.server.plugged import WORLDS, Install


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Lay out a package as pip installs it, with entry points and modules, in a folder that Python searches."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def lay_out(package: str, group: str, names: dict[str, str], **modules: str) -> None:
        for module, source in modules.items():
            (tmp_path / f"{module}.py").write_text(source, encoding="utf-8")
            monkeypatch.delitem(sys.modules, module, raising=False)
        info = tmp_path / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
        lines = [f"{name} = {place}" for name, place in names.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[gymnasium_bridge.{group}]", *lines]), encoding="utf-8")

    return lay_out


@pytest.fixture
def worlds(install: Install) -> None:
    """The protocol of the page on plugins, installed."""
    install("bridge-worlds", "protocols", {"worlds": "bridge_worlds:PROTOCOL"}, bridge_worlds=WORLDS)
