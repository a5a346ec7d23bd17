"""The text of `reference.md`: what its source `reference.in.md` names by `::: NAME`, and the help of the commands.

The docstrings are read from the sources by griffe, as the site does: nothing is imported of what they describe.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import griffe

from bridge.cli.program import COMMANDS, make_parser

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "docs" / "reference.in.md"
COMMAND_LINE = "<!-- command line -->"
"""The help texts of all sub-commands stand here."""

_ENTRY = re.compile(r"^::: (\S+)\n((?:    .*\n)*)", re.MULTILINE)
_HEAD = re.compile(r"\A---\n.*?\n---\n+", re.DOTALL)
_NOTE = "<!-- generated from docs/reference.in.md and the docstrings by docs/generate.py: do not change it here -->\n\n"


def page() -> str:
    """Return the reference as it is read in the repository."""
    # It would say of each keyword of a class's docstring that it has no type.
    logging.getLogger("griffe").setLevel(logging.CRITICAL)
    loader = griffe.GriffeLoader(search_paths=[str(ROOT)], docstring_parser=griffe.Parser.google)
    package = loader.load("bridge", try_relative_path=False)
    package.set_member("wrappers", loader.load("wrappers", try_relative_path=False))
    loader.resolve_aliases(implicit=True, external=False)

    def entry(found: re.Match[str]) -> str:
        chosen = re.search(r"members: \[(.*?)\]", found[2])
        wanted = None if chosen is None else [name.strip() for name in chosen[1].split(",") if name.strip()]
        if "force_inspection: true" in found[2]:
            return "\n\n".join(_spelled_out(found[1], 3)) + "\n"
        what: Any = package[found[1].removeprefix("bridge.")]
        return "\n\n".join(_entry(found[1], what.final_target if what.is_alias else what, wanted, 3)) + "\n"

    # The head, which is for the site's search, stays the first thing in the file.
    text = _HEAD.sub(lambda head: head[0] + _NOTE, SOURCE.read_text("utf-8"))
    return _ENTRY.sub(entry, text).replace(COMMAND_LINE, command_line().rstrip("\n"))


def command_line() -> str:
    """Return the help text of each sub-command, below a heading of its own."""
    parts = []
    for name in COMMANDS:
        printed = io.StringIO()
        with (
            contextlib.redirect_stdout(printed),
            contextlib.suppress(SystemExit),
            patch.dict(os.environ, COLUMNS="84", NO_COLOR="1"),
            patch.object(sys, "argv", ["gymnasium-bridge"]),
        ):
            make_parser(name).parse_args([name, "--help-all" if name == "serve" else "--help"])
        parts.append(f"### gymnasium-bridge {name}\n\n```text\n{printed.getvalue().rstrip()}\n```\n")
    return "\n".join(parts)


def _entry(path: str, what: Any, wanted: list[str] | None, level: int) -> list[str]:
    """Return the blocks of one entry: its heading, its signature, its docstring, and its public members."""
    found = []
    if "Unpack[" in _signature(what) if what.is_function or what.is_class else False:
        found = _spelled_out(path, level)
        if what.is_function:
            return found
    elif not what.is_module:
        found += [f'{"#" * level} <a id="{path}"></a>`{path}`']
        found += [f"```py\n{_signature(what)}\n```"] if what.is_class or what.is_function else []
    if len(found) < 3:
        found += _sections(what)
        if what.is_class and "__init__" in what.members:
            found += _sections(what.members["__init__"])
    if what.is_class or what.is_module:
        for name, member in what.members.items():
            listed = not name.startswith("_") if wanted is None else name in wanted
            if not listed or member.is_alias or (wanted is None and member.docstring is None):
                continue
            if member.is_attribute and "property" not in member.labels:
                if what.is_class:
                    found.append(_attribute(member))
            elif what.is_module and (member.is_class or member.is_function):
                found += _entry(f"{path}.{name}", member, None, level)
            elif what.is_class:
                found += _member(member)
    return found


def _spelled_out(path: str, level: int) -> list[str]:
    """Return the blocks of a function or class that shares keywords with others: it has all of them once imported."""
    module, _, name = path.rpartition(".")
    return [f'{"#" * level} <a id="{path}"></a>`{path}`', *_call_blocks(getattr(importlib.import_module(module), name))]


def _call_blocks(function: Any) -> list[str]:
    """Return how an imported function or class is called, and its docstring."""
    signature, name = inspect.signature(function), function.__name__
    given: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.name == "self" and not given:
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in given:
            given.append("*")
        value = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        given.append(f"{parameter.name}: {parameter.annotation}{value}")
    docstring = griffe.Docstring(inspect.getdoc(function) or "", parser=griffe.Parser.google)
    returned = signature.return_annotation
    # A class has the annotation of its `__init__`.
    made = inspect.isclass(function) or returned in (signature.empty, None)
    call = _call(name, given, "" if made else f" -> {returned}")
    return [f"```py\n{call}\n```", *_blocks(docstring)]


def _member(what: Any) -> list[str]:
    """Return the blocks of a method or property."""
    if what.is_attribute:
        kind = f": {what.annotation}" if what.annotation is not None else ""
        return [f"**`{what.name}{kind}`**", *_sections(what)]
    if "Unpack[" in _signature(what):
        owner = getattr(importlib.import_module(what.parent.parent.path), what.parent.name)
        return [f"**`{what.name}`**", *_call_blocks(getattr(owner, what.name))]
    return [f"**`{what.name}`**", f"```py\n{_signature(what)}\n```", *_sections(what)]


def _attribute(what: Any) -> str:
    """Return an attribute with what is said of it, in a line of a list."""
    value = f" = {what.value}" if what.value is not None and len(str(what.value)) < 60 else ""
    kind = f": {what.annotation}" if what.annotation is not None else ""
    text = " ".join(what.docstring.value.split()) if what.docstring else ""
    return f"- `{what.name}{kind}{value}`: {text}"


def _signature(what: Any) -> str:
    """Return how a function is called, or a class is made: in lines of their own where one would be long."""
    if what.is_class:
        bases = ", ".join(str(base) for base in what.bases)
        head = f"class {what.name}({bases})" if bases else f"class {what.name}"
        made = what.members.get("__init__")
        parameters = made.parameters if made is not None and not made.is_alias else what.parameters
        end = ""
    else:
        head, parameters = f"{what.name}", what.parameters
        end = f" -> {what.returns}" if what.returns is not None else ""
    given, kinds = [], griffe.ParameterKind
    star = False
    for parameter in parameters:
        if parameter.name in ("self", "cls") and not given:
            continue
        if parameter.kind is kinds.keyword_only and not star:
            given.append("*")
        star = star or parameter.kind in (kinds.keyword_only, kinds.var_positional)
        prefix = {kinds.var_positional: "*", kinds.var_keyword: "**"}.get(parameter.kind, "")
        kind = f": {parameter.annotation}" if parameter.annotation is not None else ""
        has_default = parameter.default is not None and not prefix
        value = f"{' = ' if kind else '='}{parameter.default}" if has_default else ""
        given.append(f"{prefix}{parameter.name}{kind}{value}")
    if what.is_class:
        return head + (f"\n\n{_call(what.name, given, '')}" if given else "")
    return _call(head, given, end)


def _call(name: str, given: list[str], end: str) -> str:
    line = f"{name}({', '.join(given)}){end}"
    return line if len(line) <= 100 else f"{name}(\n" + "".join(f"    {each},\n" for each in given) + f"){end}"


def _sections(what: Any) -> list[str]:
    """Return a docstring as blocks of Markdown."""
    return [] if what.docstring is None else _blocks(what.docstring)


def _blocks(docstring: griffe.Docstring) -> list[str]:
    found: list[str] = []
    for section in docstring.parsed:
        kind, value = section.kind.value, section.value
        if kind == "text":
            found.append(value.strip())
        elif kind == "examples":
            shown = "\n".join(text.strip() for _, text in value)
            found.append(f"```pycon\n{shown}\n```" if shown.startswith(">>>") else shown)
        elif kind in ("parameters", "other parameters", "attributes"):
            title = "Attributes" if kind == "attributes" else "Args"
            found.append(f"{title}:\n\n" + "\n".join(f"- `{one.name}`: {_line(one)}" for one in value))
        elif kind in ("raises", "warns"):
            lines = (f"- `{one.annotation}`: {_line(one)}" for one in value)
            found.append(f"{kind.capitalize()}:\n\n" + "\n".join(lines))
        elif kind in ("returns", "yields"):
            found.append(f"{kind.capitalize()}:\n\n" + "\n".join(f"- {_line(one)}" for one in value))
        elif kind == "admonition":
            found.append(f"{section.title}: {value.description}")
    return found


def _line(one: Any) -> str:
    return " ".join(one.description.split())
