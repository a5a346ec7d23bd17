"""`record=Recording(…)`: where and what to record."""

from __future__ import annotations

import dataclasses
import os

from bridge.errors import SettingError

__all__ = ["Recording"]


@dataclasses.dataclass(frozen=True)
class Recording:
    """What a server records, and where: a value for the keyword `record`, which also accepts just a folder.

    Actions, their players and times, rewards, flags and a hash of each observation are always recorded.

    Examples:
        >>> import tempfile
        >>> from bridge import Recording, serve_gym
        >>> recording = Recording(tempfile.mkdtemp(), observations=True, infos=True)
        >>> with serve_gym("CartPole-v1", record=recording) as server:
        ...     pass

    Args:
        folder: The folder for the recording; created if it does not exist.
        observations: Record observations, too.
        frames: Record the result of `render` after each step, which every step then waits for; the environment needs a
            render mode that returns arrays.
        infos: Record infos, too.
        unattended: In a real-time world, also record episodes without a player.
        max_bytes: The most bytes of a server's recording; beyond it, the oldest file is deleted. None: no limit.
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
        """Return the recording for a folder."""
        return given if isinstance(given, Recording) else cls(given)
