"""Ports and processes, as the tests of documentation need them."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import socket
from pathlib import Path


def free_port() -> int:
    """Return a port that nobody listens on.

    Not one that the system would give to the next who asks for any: tests beside this one ask for some all the time.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def waits_for_sigterm(pid: int) -> bool:
    """True if the process has a handler of SIGTERM, as Linux says."""
    caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)
