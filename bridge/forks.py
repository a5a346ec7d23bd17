"""What a forked process does with the connections that it inherits: it forgets them.

Threads do not exist in a forked process, and its sockets are still its parent's: waiting for the former hangs, ending
what is spoken over the latter breaks the parent's connections. So the child keeps every inherited connection and
server alive and untouched until it exits, and its environments connect anew.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any, Protocol

__all__ = ["forget_in_child", "leak"]


class _Inherited(Protocol):
    def after_fork(self) -> None:
        """Give up what belongs to the parent process."""


_inherited: weakref.WeakSet[Any] = weakref.WeakSet()


def forget_in_child(item: _Inherited) -> None:
    """Call `item.after_fork()` in every process that is forked from this one while the item lives."""
    _inherited.add(item)


def leak(item: Any) -> None:
    """Keep an object until the process ends: destroying it would touch the parent's sockets."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))


def _after_fork() -> None:
    for item in list(_inherited):
        item.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
