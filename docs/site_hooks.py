"""Hooks of MkDocs: pages that are made from other files, and links that lead out of `docs/`.

`PAGES` are files elsewhere in the repository: the home page is the README. The help texts of the command stand in
`reference.md` in place of `COMMAND_LINE`. A link to a file outside of `docs/` leads to a copy of that file in the site.
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mkdocs.structure.files import File, Files

from bridge.cli.program import COMMANDS, make_parser

ROOT = Path(__file__).resolve().parents[1]

# Pages of the site that are files elsewhere in the repository.
PAGES = {
    "index.md": "README.md",
    "changes.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "examples.md": "examples/README.md",
}

COMMAND_LINE = "<!-- command line -->"
"""The help texts of all sub-commands stand here."""

LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages made here, and the files outside of `docs/` that pages link to."""
    for name, source in PAGES.items():
        files.append(File.generated(config, name, content=_page(source)))
    for name in sorted(_linked_files(files)):
        files.append(File.generated(config, f"files/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links out of `docs/` to the site's copies; give the home page, which has no neighbours, their room."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    if COMMAND_LINE in markdown:
        markdown = markdown.replace(COMMAND_LINE, _command_line())
    return LINK.sub(lambda link: link[1] + _in_site(link[2]) + (link[3] or "") + link[4], markdown)


def _page(source: str) -> str:
    """Return a file's text with its links as seen from `docs/`."""
    folder = posixpath.dirname(source)

    def seen_from_docs(link: re.Match[str]) -> str:
        target = link[2]
        if "://" not in target:
            path = posixpath.normpath(posixpath.join(folder, target))
            target = path.removeprefix("docs/") if path.startswith("docs/") else f"../{path}"
        return link[1] + target + (link[3] or "") + link[4]

    return LINK.sub(seen_from_docs, (ROOT / source).read_text(encoding="utf-8"))


def _in_site(target: str) -> str:
    """Return where a link's target is in the site."""
    if not target.startswith("../"):
        return target
    outside = target.removeprefix("../").rstrip("/")
    for page, source in PAGES.items():
        if outside == source:
            return page
    return f"files/{outside}"


def _linked_files(files: Files) -> set[str]:
    """Return the paths of files outside of `docs/` that pages link to.

    Raises:
        FileNotFoundError: A link leads to no file.
    """
    found = set()
    for file in files.documentation_pages():
        for link in LINK.finditer(file.content_string):
            place = _in_site(link[2])
            if link[2].startswith("../") and place.startswith("files/"):
                path = place.removeprefix("files/")
                if not (ROOT / path).is_file():
                    raise FileNotFoundError(
                        f"{file.src_uri}: expected a file of the repository, got the link {link[2]}"
                    )
                found.add(path)
    return found


def _command_line() -> str:
    """Return the help text of each sub-command, below a heading of its own."""
    parts = []
    for name in COMMANDS:
        printed = io.StringIO()
        with (
            contextlib.redirect_stdout(printed),
            contextlib.suppress(SystemExit),
            patch.dict(os.environ, COLUMNS="84"),
            patch.object(sys, "argv", ["gymnasium-bridge"]),
        ):
            make_parser(name).parse_args([name, "--help-all" if name == "serve" else "--help"])
        parts.append(f"### gymnasium-bridge {name}\n\n```text\n{printed.getvalue().rstrip()}\n```\n")
    return "\n".join(parts)
