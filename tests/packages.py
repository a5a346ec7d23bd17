"""Other packages, laid out as pip installs them: entry points and modules, in a folder that Python searches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import pytest

__all__ = ["Install", "installer"]

Install: TypeAlias = Callable[..., None]
"""`install(package, names, **modules)`: entry points by name, and the source of each module."""


def installer(folder: Path, monkeypatch: pytest.MonkeyPatch, group: str) -> Install:
    """Return what lays packages out in a folder, with entry points of a group, until the test ends."""
    monkeypatch.syspath_prepend(str(folder))

    def lay_out(package: str, names: Mapping[str, str], **modules: str) -> None:
        for module, source in modules.items():
            (folder / f"{module}.py").write_text(source, encoding="utf-8")
            monkeypatch.delitem(sys.modules, module, raising=False)
        info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
        lines = [f"{name} = {place}" for name, place in names.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]), encoding="utf-8")

    return lay_out
