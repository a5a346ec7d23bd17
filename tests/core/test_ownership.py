"""What a forked process gives up of what its parent owns."""

from __future__ import annotations

import os

import pytest

from bridge.core.ownership import forget_in_child


class Item:
    """Something of the parent process."""

    def __init__(self) -> None:
        self.given_up = False

    def after_fork(self) -> None:
        self.given_up = True


class Stubborn(Item):
    """Cannot be given up."""

    def after_fork(self) -> None:
        raise RuntimeError("it is not given up")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_what_cannot_be_given_up_keeps_nothing_else_from_it() -> None:
    items = [kind() for kind in (Item, Stubborn) for _ in range(6)]  # they are called in no order
    for item in items:
        forget_in_child(item)
    process = os.fork()
    if process == 0:
        os._exit(sum(item.given_up for item in items))
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 6
    assert not any(item.given_up for item in items)
