"""Ports and processes, as the tests of documentation need them."""

from __future__ import annotations

import re
import signal
from pathlib import Path


def waits_for_sigterm(pid: int) -> bool:
    """True if the process has a handler of SIGTERM, as Linux says."""
    caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)
