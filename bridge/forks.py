"""What a forked process does with the connections that it inherits: it forgets them.

gRPC's threads do not exist in a forked process, and its sockets are still its parent's: using either hangs, closing
them breaks the parent's connections. So the child keeps every inherited gRPC object alive and untouched until it
exits, its environments connect anew, and where the parent had used gRPC they do so through a process of their own
(`bridge.client.relay`).
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any, Protocol

__all__ = ["forget_in_child", "leak", "must_relay", "note_grpc_in_use"]


class _Inherited(Protocol):
    def after_fork(self) -> None:
        """Give up what belongs to the parent process."""


_inherited: weakref.WeakSet[Any] = weakref.WeakSet()
_in_use = False
_relay = False


def forget_in_child(item: _Inherited) -> None:
    """Call `item.after_fork()` in every process that is forked from this one while the item lives."""
    _inherited.add(item)


def note_grpc_in_use() -> None:
    """Take note that this process has used gRPC, so that none forked from it may."""
    global _in_use
    _in_use = True


def must_relay() -> bool:
    """Whether this process was forked from one that had used gRPC, and so cannot use it itself."""
    return _relay


def leak(item: Any) -> None:
    """Keep an object until the process ends: destroying it would touch the parent's sockets."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))


def _after_fork() -> None:
    global _relay, _in_use
    _relay, _in_use = _relay or _in_use, False
    for item in list(_inherited):
        item.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
