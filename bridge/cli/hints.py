"""Hints that commands print: Python lines that connect to a server."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

__all__ = ["as_python", "connecting_lines", "joining_url", "naming_url"]


def as_python(value: object) -> str:
    """Write a value as Python's source, with text in double quotes as in the lines around it."""
    text = repr(value)
    return text if '"' in text else re.sub(r"'([^'\\]*)'", r'"\1"', text)


def joining_url(url: str) -> str:
    """Return the URL of a server's default world, which clients share."""
    return f"{url}{'&' if '?' in url else '?'}world="


def naming_url(url: str, env_id: str) -> str:
    """Return the URL of one of a server's environments."""
    if url.startswith("unix:"):
        return f"{url}{'&' if '?' in url else '?'}env_id={env_id}"
    base, mark, query = url.partition("?")
    return f"{base.rstrip('/')}/{env_id}{mark}{query}"


def connecting_lines(
    urls: Sequence[str],
    ids: Sequence[str],
    kind: str,
    credentials: Mapping[str, str] = MappingProxyType({}),
    *,
    watched: bool = False,
) -> list[str]:
    """Return two lines of Python that connect to a server.

    Args:
        urls: The URLs, one for each world.
        ids: The environment ids that a client may choose from.
        kind: The kind of the worlds: `one` environment, `lanes`, `agents`, or a `match`, in which a program takes one
            seat; `dialed`: the URL is where servers dial in.
        credentials: The further keywords of a client, as Python text.
        watched: True if a page shows the default world: then the client joins that world, so that people see it.
    """
    if len(ids) > 1:  # the client must choose one of them
        urls = [naming_url(url, ids[0]) for url in urls]
    quoted = [f'"{url}"' for url in urls]
    given = "".join(f", {name}={value}" for name, value in credentials.items())
    names = "TLS, " if "tls" in credentials else ""
    if kind == "agents":
        return [
            f"from bridge import {names}make_parallel_remote",
            f"env = make_parallel_remote({quoted[0]}{given})",
        ]
    if kind == "match":
        return [
            f"from bridge import {names}make_remote",
            f'env = make_remote("{joining_url(urls[0])}", timeout=3600{given})  # reset() waits for the next round',
        ]
    if kind == "dialed":
        return [
            f"from bridge import {names}make_vec_remote",
            f"envs = make_vec_remote({quoted[0]}, num_envs=1, blocking=True{given})",
        ]
    if len(urls) > 1 or kind == "lanes":
        where = f"[{', '.join(quoted)}]" if len(urls) > 1 else quoted[0]
        return [f"from bridge import {names}make_vec_remote", f"envs = make_vec_remote({where}, blocking=True{given})"]
    if watched and len(ids) <= 1:
        joining = f'env = make_remote("{joining_url(urls[0])}"{given})  # the world that the page shows'
        return [f"from bridge import {names}make_remote", joining]
    return [f"from bridge import {names}make_remote", f"env = make_remote({quoted[0]}{given})"]
