"""Code of the client asks the object that it holds, and not one that it reaches through two others."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.places import ROOT

FOLDERS = ("bridge/core/client", "bridge/core/adapters", "wrappers")
PARTS = {
    "stepper",
    "pool",
    "poller",
    "policy",
    "placement",
    "watch",
    "members",
    "remote",
    "record",
    "realtime",
    "session",
}
"""What is behind a vector environment: each has methods that say what is asked of it."""


def links_of(node: ast.expr) -> list[str]:
    """The names of an expression such as `self.pool.members.at[0].remote`, without calls and subscripts."""
    match node:
        case ast.Attribute(value, name):
            return [*links_of(value), name]
        case ast.Subscript(value) | ast.Call(value):
            return links_of(value)
        case ast.Name(name):
            return [name]
    return []


def reaches(source: str) -> Iterator[tuple[int, str]]:
    """Give the line and the text of each expression that leads through two of `PARTS` to something else."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute | ast.Subscript | ast.Call):
            *through, _ = links_of(node)
            parts = [name.lstrip("_") in PARTS for name in through]
            if sum(parts) > 1 and parts[-1]:
                yield node.lineno, ast.unparse(node)


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_is_reached_through_two_others(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {text}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in reaches(path.read_text())
    ]
    assert found == [], "give the first object a method that says what is asked, or keep the second one"


def test_what_is_found() -> None:
    source = """
self.pool.members.add(request)
members = pool.members
members.filling[0].remote.url
slots.pool.policy.ready_spare(member)
self._session.remote().url
"""
    assert sorted(line for line, _ in reaches(source)) == [2, 4, 5, 6]
