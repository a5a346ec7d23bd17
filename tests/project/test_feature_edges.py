"""Who imports whom, read from the syntax trees: folders, files, features, and the core, which names no feature.

Imports inside of functions and for type checkers count like all others.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.places import ROOT

FEATURES = {
    "dial": "bridge/dial",
    "fleet": "bridge/fleet",
    "game": "bridge/game",
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
ABOVE = ("bridge/__init__.py", "bridge/__main__.py", "bridge/facade", "bridge/cli")
"""The composition root, and what stands on it: it may know every feature."""
BELOW = ("bridge/core", "bridge/pb", "bridge/errors.py", "bridge/version.py", "bridge/registration.py", "wrappers")
"""The core, what it stands on, and the wrappers of the clients' environments."""
BLOCKS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


ALONE = ("bridge/errors.py", "bridge/version.py", "bridge/registration.py")
"""Modules beside the package's own that are a place by themselves: everything stands on them."""
FOLDERS_NOT_YET: set[tuple[str, str]] = set()
"""Files, and the folders that they import although their docstrings do not allow it: to be mended, so none is added."""
CORE_EDGES_NOT_YET: set[tuple[str, str]] = set()
"""Imports of the core of what is none of it: to be mended, so none is added."""
FEATURE_NAMES = {
    *(
        "perlert",
        "perlerts",
        "openenv",
        "openenvs",
        "dial",
        "dials",
        "dialed",
        "dialing",
        "takeover",
        "takeovers",
        "gateway",
        "gateways",
        "lobby",
        "lobbies",
    ),
    *("replay", "replays", "recording", "recordings", "page", "pages", "browser", "browsers", "web"),
    *("webpage", "webpages", "website", "websites", "replayed", "fleet", "fleets"),
    *("match", "matches", "seat", "seats", "spectator", "spectators", "listen"),
}
"""Words for what only features know; the core names none of them, but for `EXCEPTED`."""
EXCEPTED = {
    ("", "spectator"): "the role of JoinWorld on the wire: one who gets observations and does not act",
    ("", "listen"): "what a socket does",
    ("encoding/step_codec.py", "match"): "the method of a pattern of `re`",
    ("encoding/step_codec.py", "matches"): "bytes that have the form of a template",
    ("logs.py", "match"): "the method of a pattern of `re`",
    ("keywords.py", "matches"): "difflib's `get_close_matches`",
    ("worlds/recipe.py", "matches"): "an id that is looked for among those that are registered",
    ("transport/service.py", "gateway"): "BAD_GATEWAY and GATEWAY_TIMEOUT, statuses of HTTP",
    ("transport/websocket.py", "gateway"): "BAD_GATEWAY, a code with which a WebSocket closes",
    ("transport/message_socket.py", "gateway"): "what HTTP calls a proxy that answers by itself",
    ("server/http11.py", "page"): "a page of any site, on whose behalf a browser asks: what HTTP keeps apart by Origin",
    ("server/registry.py", "web"): "the property `server.web` on the wire",
    ("server/registry.py", "seats"): "a key of that property",
    ("server/core_server.py", "web"): "the extra that brings WebSocket, and the public `Server.web_url`",
    ("client/wire/connection.py", "web"): "the extra that brings WebSocket",
    ("image_files.py", "web"): "the extra that brings Pillow",
    (
        "worlds/realtime/acting_stream.py",
        "seat",
    ): "on the wire, the property `world.seat`, a key of an agent's second stream, and the setting of JoinWorld",
    ("worlds/realtime/frame_pacer.py", "seat"): "the same",
    ("server/metrics.py", "spectators"): "as the wire's role",
    ("encoding/infos.py", "takeover"): "`takeover_fps`, a key of an info on the wire, which clients keep to",
}
"""Words of `FEATURE_NAMES` that mean something else here: by the file in the core, or "" for all, with the reason."""
NAMES_NOT_YET = {
    ("client/wire/connection.py", "dialed"),
    ("client/wire/connection.py", "dialed"),
    ("client/wire/dialed.py", "dialed"),
    ("client/wire/grpc_client.py", "dialed"),
    ("client/wire/websocket_client.py", "dialed"),
    ("transport/address.py", "dialed"),
}
"""Files of the core, and words in them that name a feature: to be mended, so none is added."""
CIRCLES_NOT_YET: set[tuple[str, ...]] = set()
"""Files that import each other in a circle: to be mended, so none is added."""


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

    for node, lazy in walk(tree_of(ROOT / path), False):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = str(node.module)
            if node.level:
                parents = re.sub("^wrappers", "bridge/wrappers", path).split("/")[: -node.level]
                module = ".".join([*parents, *([node.module] if node.module else [])])
            # What is imported from a package may be one of its modules, or a name in it.
            whole = [f"{module}.{alias.name}" for alias in node.names]
            names = [name if path_of(name) else module for name in whole]
        for name in names:
            target = path_of(name) if name.partition(".")[0] == "bridge" else None
            if target is not None:
                yield Import(path, node.lineno, target, lazy)


@functools.cache
def files() -> list[str]:
    found = [*(ROOT / "bridge").rglob("*.py"), *(ROOT / "wrappers").rglob("*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def feature_of(path: str) -> str | None:
    return next((name for name, folder in FEATURES.items() if is_in(path, folder)), None)


# Folders


def folder_of(path: str) -> str:
    """The folder that a file, or a package's folder, is or lies in; a module of `ALONE` is a place by itself."""
    return path if path in ALONE or not path.endswith(".py") else str(Path(path).parent)


def folders() -> list[str]:
    return sorted({folder_of(path) for path in files()} - set(ALONE) - {"bridge/standalone"})


def may_import(folder: str) -> set[str]:
    """The folders that may import one, as the last paragraph of its docstring says: "May be imported by …".

    `core.worlds` is a folder without those in it, `core.worlds.*` with them.
    """
    doc = ast.get_docstring(tree_of(ROOT / folder / "__init__.py"))
    last = " ".join((doc or "").split("\n\n")[-1].split())
    match = re.fullmatch(r"May be imported by (.*)\.", last)
    assert match is not None, f"{folder}/__init__.py does not say in the end what may import it: 'May be imported by …'"
    if match[1] == "everything":
        return {*folders(), *ALONE}
    found: set[str] = set()
    for name in re.findall(r"`([\w.*]+)`", match[1]):
        place = "bridge" if name in ("bridge", "bridge.__main__") else f"bridge/{name.replace('.', '/')}"
        named = [each for each in folders() if is_in(each, place.removesuffix("/*"))] if name[-1] == "*" else [place]
        assert named, f"{folder}/__init__.py names {name}, which is no folder"
        assert set(named) <= set(folders()), f"{folder}/__init__.py names {name}, which is no folder"
        found.update(named)
    if "the composition root" in match[1]:
        found |= {"bridge", "bridge/facade", "bridge/cli"}
    if "what is above the core" in match[1]:
        found |= {each for each in folders() if not is_in(each, BELOW) or each == "wrappers"}
    return found


def edges_of_folders() -> dict[tuple[str, str], list[Import]]:
    """The imports between folders, by the file and the folder that it imports."""
    found: dict[tuple[str, str], list[Import]] = {}
    for path in files():
        for each in imports(path):
            if folder_of(each.target) not in (folder_of(path), *ALONE):
                found.setdefault((path, folder_of(each.target)), []).append(each)
    return found


def circles(arrows: set[tuple[str, str]]) -> list[tuple[str, ...]]:
    """Return the largest sets of names each of which leads to all others of its set, by arrows."""
    leads: dict[str, set[str]] = {}
    for start in {name for arrow in arrows for name in arrow}:
        left = [start]
        leads[start] = set()
        while left:
            more = {to for of, to in arrows if of == left[-1]} - leads[start]
            left.pop()
            leads[start] |= more
            left += more
    found = {tuple(sorted(to for to in leads[name] if name in leads[to])) for name in leads if name in leads[name]}
    return sorted(found)


@pytest.mark.parametrize("folder", folders())
def test_the_docstring_of_a_folder_says_what_is_in_it_and_what_may_import_it(folder):
    if folder == "bridge":
        return  # the package itself, which nothing below imports
    assert may_import(folder) - {folder}
    doc = ast.get_docstring(tree_of(ROOT / folder / "__init__.py")) or ""
    assert not doc.startswith("May be imported by")


@pytest.mark.slow
def test_folders_are_imported_by_those_alone_that_their_docstrings_name():
    allowed_by = {folder: may_import(folder) if folder != "bridge" else set() for folder in folders()}
    found = {
        (path, folder): [f"{path}:{each.line}" for each in where]
        for (path, folder), where in edges_of_folders().items()
        if folder_of(path) not in allowed_by[folder]
    }
    assert {key: where for key, where in found.items() if key not in FOLDERS_NOT_YET} == {}
    assert FOLDERS_NOT_YET - set(found) == set(), "no longer there: take them out of the table"


@pytest.mark.slow  # it reads all sources
def test_folders_import_each_other_in_no_circle():
    arrows = {(folder_of(path), to) for path, to in edges_of_folders() if (path, to) not in FOLDERS_NOT_YET}
    assert circles(arrows) == []


@pytest.mark.slow
def test_files_import_each_other_in_no_circle():
    arrows = {
        (path, f"{each.target}/__init__.py" if not each.target.endswith(".py") else each.target)
        for path in files()
        for each in imports(path)
    }
    found = set(circles({(of, to) for of, to in arrows if of != to}))
    assert found - CIRCLES_NOT_YET == set()
    assert CIRCLES_NOT_YET - found == set(), "no longer there: take them out of the table"


def test_circles_are_found():
    assert circles({("a", "b"), ("b", "c")}) == []
    assert circles({("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("d", "e"), ("e", "d")}) == [
        ("a", "b", "c"),
        ("d", "e"),
    ]


# The core


def words_of(path: str) -> Iterator[str]:
    """Give the words of a file's own identifiers and strings, and of its name; docstrings are left out."""
    tree = tree_of(ROOT / path)
    texts = [Path(path).stem]
    docs: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else []:
            # A string that stands alone says something of what is above it.
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                docs.add(id(each.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            texts.append(node.value)
        texts += [str(getattr(node, name)) for name in ("id", "attr", "name", "arg") if getattr(node, name, None)]
    for text in texts:
        # WebSocket is the name of a protocol, not of what is on the web.
        plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", re.sub("web_?socket", "", text, flags=re.IGNORECASE))
        yield from (word.lower() for word in re.findall("[A-Za-z]+", plain))


@pytest.mark.slow  # it reads all sources
def test_the_core_imports_nothing_but_itself():
    core = ("bridge/core", "bridge/pb", "bridge/errors.py", "bridge/version.py")
    found = {
        (path, each.target)
        for path in files()
        if is_in(path, "bridge/core")
        for each in imports(path)
        if not is_in(each.target, core)
    }
    assert found - CORE_EDGES_NOT_YET == set()
    assert CORE_EDGES_NOT_YET - found == set(), "no longer there: take them out of the table"


@pytest.mark.slow  # it reads all sources
def test_the_core_names_no_feature():
    found, excepted = set(), set()
    for path in files():
        if not is_in(path, "bridge/core"):
            continue
        place = path.removeprefix("bridge/core/")
        for word in FEATURE_NAMES.intersection(words_of(path)):
            keys = {("", word), (place, word)} & set(EXCEPTED)
            excepted |= keys
            if not keys:
                found.add((place, word))
    assert found - NAMES_NOT_YET == set()
    assert NAMES_NOT_YET - found == set(), "no longer there: take them out of the table"
    assert set(EXCEPTED) - excepted == set(), "no longer needed: take them out of the table"


def test_words_are_those_of_identifiers_and_of_strings(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.project.test_feature_edges.ROOT", tmp_path)
    (tmp_path / "seat_of.py").write_text(
        '"""A page."""\nimport dial.here\nclass WebReplay:\n    """A page."""\n    lobby: int\n    """A page."""\n'
        "    def listen(self, openenv=1):\n        return f'matches of {self.gateway} by WebSocket'(takeover=2)\n"
    )
    expected = "seat of dial here web replay lobby int listen self openenv matches gateway by takeover"
    assert sorted(set(words_of("seat_of.py"))) == sorted(expected.split(" "))


# Features


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


@pytest.mark.slow  # it reads all sources
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


@pytest.mark.parametrize("folder", ["bridge/core/client", "bridge/core/transport"])
def test_the_client_and_the_transport_import_no_feature_and_nothing_that_stands_above(folder):
    found = [each for path in files() if is_in(path, folder) for each in imports(path)]
    assert len(found) > 20
    assert [each for each in found if feature_of(each.target) or is_in(each.target, (*ABOVE, "wrappers"))] == []


def test_imports_are_told_apart_by_when_they_run(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.project.test_feature_edges.ROOT", tmp_path)
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
