"""Fixtures of tests that look at the whole project: a browser, for walks through the documentation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.browser import launched, opened_in


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """Opens pages, each in a browser profile of its own."""
    with launched() as chromium, opened_in(chromium) as make:
        yield make
