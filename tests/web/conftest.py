"""Fixtures of the page and of those who watch: a browser, and streams of spectators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.browser import launched, opened_in
from tests.web.viewers import Viewer


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """One browser for all tests of this folder: it takes a second to start."""
    with launched() as chromium:
        yield chromium


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages, each in a browser profile of its own."""
    with opened_in(browser) as make:
        yield make


@pytest.fixture
def viewers() -> Iterator[Callable[[Any], Viewer]]:
    """Makes streams that watch a server, and closes them in the end."""
    made: list[Viewer] = []

    def make(server: Any) -> Viewer:
        made.append(Viewer(server, own_connection=True))
        return made[-1]

    yield make
    for stream in made:
        stream.die()
        stream.channel.close()
