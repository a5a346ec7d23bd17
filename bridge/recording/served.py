"""The keyword `record` of a server: open the folder, and record the worlds of a source."""

from __future__ import annotations

import os
from typing import Any

from bridge.core.extras import needed
from bridge.recording.record import Recording

__all__ = ["open_journal", "recorded"]


def open_journal(record: str | os.PathLike[str] | Recording) -> Any:
    """Return the journal that writes a recording to a folder.

    Raises:
        SettingError: The folder cannot be written, or pyarrow is not installed.
    """
    with needed("record= needs pyarrow", "record"):
        from bridge.recording.writer import Journal

    return Journal(record)


def recorded(source: Any, journal: Any) -> Any:
    """Return a source whose worlds are recorded by a journal.

    Raises:
        SettingError: Frames are to be recorded, but the environment is made without a render mode.
    """
    from bridge.recording.source import RecordedSource

    return RecordedSource(source, journal)
