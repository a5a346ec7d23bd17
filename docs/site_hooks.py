"""Hooks of MkDocs: pages that are made from other files, and links that lead out of `docs/`.

`PAGES` are files elsewhere in the repository: the home page is the README. The reference is made of its source,
`reference.in.md`, whose names mkdocstrings replaces; `reference.md` is for who reads it in the repository. A link to
a file outside of `docs/` leads to a copy of that file in the site.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
from reference_text import COMMAND_LINE, SOURCE, command_line

_HEAD = re.compile(r"\A---\n.*?\n---\n+", re.DOTALL)
ROOT = Path(__file__).resolve().parents[1]

# Pages of the site that are files elsewhere in the repository.
PAGES = {
    "index.md": "README.md",
    "changes.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "examples.md": "examples/README.md",
    "recording-format.md": "proto/recording-format.md",
    "attacks.md": "benchmarks/attacks.md",
    "zoo.md": "benchmarks/zoo.md",
    "versions.md": "tests/versions/README.md",
    "old-pythons.md": "tests/old_pythons/README.md",
}

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
    if page.file.src_uri == "reference.md":
        markdown = _HEAD.sub("", SOURCE.read_text("utf-8")).replace(COMMAND_LINE, command_line())
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
