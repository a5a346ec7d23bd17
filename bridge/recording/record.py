"""`record=Recording(…)`: where to, what, and how much is recorded."""

from __future__ import annotations

import dataclasses
import os

from bridge.errors import SettingError

__all__ = ["Recording"]


@dataclasses.dataclass(frozen=True)
class Recording:
    """Says what a server records, and where: the keyword `record`, which takes a folder alone, too.

    Actions, who applied them and when, rewards, flags and a hash of each observation are recorded in any case.

    Examples:
        >>> import tempfile
        >>> from bridge import Recording, serve_gym
        >>> recording = Recording(tempfile.mkdtemp(), observations=True, infos=True)
        >>> with serve_gym("CartPole-v1", record=recording) as server:
        ...     pass

    Args:
        folder: A folder in which every episode is recorded; made if there is none.
        observations: Record the observations too.
        frames: Record what `render` gives after each step too, which every step then waits for; the environment needs
            a render mode that gives arrays.
        infos: Record the infos too.
        unattended: In a real-time world, record the episodes too that nobody plays.
        max_bytes: The most bytes of a server's recording, after which its oldest file is deleted; None: no limit.
    """

    folder: str | os.PathLike[str]
    observations: bool = False
    frames: bool = False
    infos: bool = False
    unattended: bool = False
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.folder, (str, os.PathLike)) or not os.fspath(self.folder):
            raise SettingError(f"expected record to be a folder, or bridge.Recording(folder, …), got {self.folder!r}")
        most = self.max_bytes
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
            raise SettingError(f"expected max_bytes to be a positive number of bytes, or None, got {most!r}")

    @classmethod
    def of(cls, given: str | os.PathLike[str] | Recording) -> Recording:
        """Return what a folder stands for."""
        return given if isinstance(given, Recording) else cls(given)
