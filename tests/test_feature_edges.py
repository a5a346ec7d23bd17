"""Features know the core, and each other only where a table in CONTRIBUTING.md says so: read from the syntax trees."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FEATURES = {
    "dial": "bridge/dial",
    "fleet": "bridge/fleet",
    "openenv": "bridge/openenv",
    "perlert": "bridge/perlert",
    "policies": "bridge/policies",
    "recording": "bridge/recording",
    "standalone": "bridge/standalone",
    "states": "bridge/states",
    "testing": "bridge/testing",
    "web": "bridge/web",
}
"""The folder of each feature."""
ABOVE = ("bridge/__init__.py", "bridge/__main__.py", "bridge/facade", "bridge/cli", "bridge/demo.py")
"""The composition root, and what stands on it: it may know every feature."""
BELOW = ("bridge/core", "bridge/pb", "bridge/errors.py", "bridge/version.py", "bridge/registration.py", "wrappers")
"""The core, what it stands on, and the wrappers of the clients' environments."""
BLOCKS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Import(NamedTuple):
    """A module of ours that a file names in an import."""

    path: str
    line: int
    target: str
    """The path of what is imported: of a module, or of a package's folder."""
    lazy: bool
    """True if it is imported once a function runs, or by type checkers alone."""


def is_in(path: str, places: tuple[str, ...] | str) -> bool:
    folders = [places] if isinstance(places, str) else places
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def path_of(module: str) -> str | None:
    """The path of a module or package of ours; None: it is none."""
    path = re.sub(r"^bridge/wrappers\b", "wrappers", module.replace(".", "/"))
    if (ROOT / f"{path}.py").is_file():
        return f"{path}.py"
    if path == "bridge":
        return "bridge/__init__.py"
    return path if (ROOT / path / "__init__.py").is_file() else None


def imports(path: str) -> Iterator[Import]:
    """Give the imports of a file."""

    def walk(node: ast.AST, lazy: bool) -> Iterator[tuple[ast.AST, bool]]:
        for child in ast.iter_child_nodes(node):
            checking = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            later = lazy or checking or isinstance(child, BLOCKS)
            yield child, later
            yield from walk(child, later)

    for node, lazy in walk(ast.parse((ROOT / path).read_text(encoding="utf-8")), False):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import"
            # What is imported from a package may be one of its modules, or a name in it.
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if path_of(name) else str(node.module) for name in whole]
        for name in names:
            target = path_of(name) if name.partition(".")[0] == "bridge" else None
            if target is not None:
                yield Import(path, node.lineno, target, lazy)


def files() -> list[str]:
    found = [*(ROOT / "bridge").rglob("*.py"), *(ROOT / "wrappers").rglob("*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def feature_of(path: str) -> str | None:
    return next((name for name, folder in FEATURES.items() if is_in(path, folder)), None)


def edges() -> dict[tuple[str, str], list[Import]]:
    """The imports between features, by the two features."""
    found: dict[tuple[str, str], list[Import]] = {}
    for path in files():
        feature = feature_of(path)
        for each in imports(path) if feature is not None else ():
            other = feature_of(each.target)
            if feature is not None and other not in (None, feature):
                found.setdefault((feature, str(other)), []).append(each)
    return found


def allowed() -> dict[tuple[str, str], str]:
    """The table of CONTRIBUTING.md: the reason of each edge."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` → `(\w+)` \| (.*) \|$", text, re.MULTILINE)
    assert len({row[:2] for row in rows}) == len(rows)
    return {(feature, other): reason for feature, other, reason in rows}


def test_every_file_is_of_the_core_of_a_feature_or_above_them():
    for path in files():
        places = [feature_of(path) is not None, is_in(path, ABOVE), is_in(path, BELOW)]
        assert places.count(True) == 1, path
    assert all((ROOT / folder).is_dir() for folder in FEATURES.values())


def test_features_know_each_other_only_where_the_table_of_contributing_says_why():
    table = allowed()
    found = {edge: [f"{each.path}:{each.line}" for each in where] for edge, where in edges().items()}
    assert {edge: where for edge, where in found.items() if edge not in table} == {}, "edges that are not in the table"
    assert set(table) - set(found) == set(), "edges of the table that are not there: take them out"
    assert all(len(reason.split()) > 3 for reason in table.values())


def test_a_feature_is_imported_by_another_one_only_once_it_is_used():
    assert [each for where in edges().values() for each in where if not each.lazy] == []


def test_no_circle_of_features_knows_each_other():
    left = set(allowed())
    while ends := {edge for edge in left if edge[1] not in {feature for feature, _ in left}}:
        left -= ends
    assert left == set(), "a circle"


@pytest.mark.parametrize("feature", sorted(FEATURES))
def test_a_feature_imports_nothing_that_stands_above_it(feature):
    found = [each for path in files() if feature_of(path) == feature for each in imports(path)]
    assert [each for each in found if is_in(each.target, ABOVE)] == []


def test_imports_are_told_apart_by_when_they_run(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.test_feature_edges.ROOT", tmp_path)
    for name in ("bridge", "bridge/dial", "bridge/fleet"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "bridge" / "fleet" / "plan.py").touch()
    (tmp_path / "bridge" / "dial" / "here.py").write_text(
        (
            "from typing import TYPE_CHECKING\n"
            "import PACKAGE.fleet.plan\n"
            "from PACKAGE.fleet import plan\n"
            "if TYPE_CHECKING:\n    from PACKAGE.fleet.plan import Plan\n"
            "try:\n    from PACKAGE import fleet\nexcept ImportError:\n    pass\n"
            "class Here:\n    from PACKAGE import serve_gym\n"
            "    def use(self):\n        from PACKAGE.fleet.plan import Plan\n"
        ).replace("PACKAGE", "bridge")
    )
    found = [(each.line, each.target, each.lazy) for each in imports("bridge/dial/here.py")]
    assert sorted(found) == [
        (2, "bridge/fleet/plan.py", False),
        (3, "bridge/fleet/plan.py", False),
        (5, "bridge/fleet/plan.py", True),
        (7, "bridge/fleet", False),
        (11, "bridge/__init__.py", False),
        (13, "bridge/fleet/plan.py", True),
    ]
