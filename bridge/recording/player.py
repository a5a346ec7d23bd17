"""A recorded episode as an environment for spectators, with pause, seek and speed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from bridge.core.extras import provided
from bridge.core.server.auth import Auth
from bridge.core.server.core_server import CoreServer
from bridge.errors import RecordingError, SettingError
from bridge.recording.episodes import ObservedRows, observed_rows
from bridge.recording.reader import RecordedEpisode, open_episode

__all__ = ["LARGEST_SPEED", "EpisodeEnv", "begun", "serve_episode"]

LARGEST_SPEED = 100.0
"""The most steps of an episode per frame."""


class EpisodeEnv(gymnasium.Env[Any, Any]):
    """Shows a recorded episode: each `step` advances it, whatever the action.

    With several agents, it shows the first one's view. At its end the episode is truncated, and `reset` starts it
    again; so does `play` if it stands still there. `pause`, `play`, `seek` and the attributes below are for spectators:
    `env.call("seek", 100)`.

    Args:
        episode: The episode, or `FOLDER/ID`.
        env: Makes the environment if observations or frames were not recorded; None: the id in the recording.
        render_mode: `rgb_array` for pictures.
        loop: True if the episode ends and so starts again; False: the last step is shown until somebody seeks or plays.
        allow_calls: As for `Replay`.

    Raises:
        RecordingError: The episode was recorded without observations and cannot be replayed.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012 - Gymnasium's own

    def __init__(
        self,
        episode: RecordedEpisode | str,
        env: Any = None,
        render_mode: str | None = None,
        *,
        loop: bool = True,
        allow_calls: bool = False,
    ) -> None:
        self._allow_calls = allow_calls
        self._episode = episode if isinstance(episode, RecordedEpisode) else open_episode(episode)
        self._env = env
        self._loop = loop
        self.render_mode = render_mode
        stream = self._episode.stream
        self.observation_space = stream.spaces[0][0]
        self.action_space = spaces.Discrete(1)
        # A copy, because the class's dict is shared by all episodes.
        self.metadata = {**self.metadata, "render_fps": self._episode.fps or 30}
        self.paused = False
        """True if it is paused."""
        self.position = 0
        """The step of the episode that is shown, 0 for the first observation."""
        self.length = self._episode.length
        """The number of steps of the episode."""
        self._steps = stream.column("t")[self._episode.own]
        rewards = self._episode.rewards
        self._rewards = rewards[:, 0] if stream.agents else rewards
        self._speed = 1.0
        self._due = 0.0
        self._rows: ObservedRows | None = None
        self._next = 0
        self._observation: Any = None
        # Drawn only on demand: a seek skips many steps.
        self._frame: Callable[[], Any] | None = None
        self._picture: Any = None

    @property
    def speed(self) -> float:
        """Steps of the episode per step of this environment: 1 as recorded, 0.5 for half the speed."""
        return self._speed

    @speed.setter
    def speed(self, speed: float) -> None:
        if not isinstance(speed, (int, float)) or not 0 < speed <= LARGEST_SPEED:
            raise SettingError(f"expected a speed above 0 and at most {LARGEST_SPEED:g}, got {speed!r}")
        self._speed = float(speed)

    def pause(self) -> None:
        """Pause the replay."""
        self.paused = True

    def play(self) -> None:
        """Continue; at the end, start again."""
        if self.paused and self.position >= self.length:
            self.seek(0)
        self.paused = False

    def seek(self, position: int) -> int:
        """Go to a step of the episode, limited to 0 and `length`, and return it."""
        self._go(min(max(int(position), 0), self.length))
        self._due = 0.0
        return self.position

    def steer(
        self, *, paused: bool | None = None, position: int | None = None, speed: float | None = None
    ) -> dict[str, Any]:
        """Change the given settings, and return the state of the replay.

        Args:
            paused: True to pause, False to continue.
            position: The step of the episode to show.
            speed: See the attribute.

        Returns:
            A dict of JSON values: the episode's `episode`, `title`, `players`, `began`, `return`, `length` and `parent`
                (None unless it is a branch), and `position`, `paused`, `speed` and `fps`.
        """
        if speed is not None:
            self.speed = speed
        if position is not None:
            self.seek(position)
        if paused is not None:
            self.pause() if paused else self.play()
        episode = self._episode
        return {
            "episode": episode.id,
            "title": episode.stream.title,
            "players": episode.players,
            "began": episode.started,
            "return": episode.total if np.isfinite(episode.total) else None,
            "length": self.length,
            "parent": None if episode.parent is None else episode.parent.facts(),
            "position": self.position,
            "paused": self.paused,
            "speed": self.speed,
            "fps": float(self.metadata["render_fps"]),
        }

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start the episode again, or at the step `options["position"]`."""
        super().reset(seed=seed)
        self.seek((options or {}).get("position", 0))
        return self._observation, self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Advance, unless paused."""
        reward = 0.0
        if not self.paused:
            # At half speed every second call makes a step, at double speed each call makes two: the fraction is carried
            # over.
            self._due += self._speed
            steps, self._due = int(self._due), self._due - int(self._due)
            before = self.position
            self._go(min(before + steps, self.length))
            reward = float(np.sum(self._rewards[before : self.position]))
        ended = self.position >= self.length and not self.paused
        # Paused without ending: an episode that ends would start again.
        if ended and not self._loop:
            self.paused, ended = True, False
        return self._observation, reward, False, ended, self._info()

    def _info(self) -> dict[str, Any]:
        now = self._episode.own[np.searchsorted(self._steps, [self.position])]
        by = self._episode.stream.players(now)[0] if self.position else ""
        return {"episode_id": self._episode.id, "position": self.position, "paused": self.paused, "by": by}

    def _go(self, position: int) -> None:
        """Show a step; to go back, begin a new replay."""
        # A replay only goes forward. If its first row raised, the generator is exhausted, and a new one is needed.
        if self._rows is None or position < self.position or self._next == 0:
            frames = self.render_mode == "rgb_array"
            self._rows = observed_rows(
                self._episode, self._env, frames=frames, check=False, allow_calls=self._allow_calls
            )
            self._next = 0
        while self._next <= position:
            _, observation, self._frame = next(self._rows)
            self._next += 1
            self._picture = None
            if agents := self._episode.stream.agents:
                # After the first agent's end, its last observation stays.
                observation = observation.get(agents[0], self._observation)
            self._observation = observation
        self.position = position

    def render(self) -> Any:
        """Return the picture of the step that is shown."""
        if self._picture is None and self._frame is not None:
            self._picture = self._frame()
        return self._picture

    def close(self) -> None:
        """Close the environment of the replay."""
        rows, self._rows = self._rows, None
        if rows is not None:
            rows.close()


def begun(
    episode: RecordedEpisode, env: Any, render_mode: str | None, *, loop: bool = True, allow_calls: bool = False
) -> EpisodeEnv:
    """Return an `EpisodeEnv` that shows the first observation, with its picture.

    Raises:
        RecordingError: The episode cannot be shown, or cannot be drawn.
        SettingError: Making its environment failed.
    """
    made = EpisodeEnv(episode, env, render_mode, loop=loop, allow_calls=allow_calls)
    try:
        made.reset()
        if render_mode is not None:
            made.render()
    except BaseException:
        made.close()
        raise
    return made


def serve_episode(
    episode: RecordedEpisode | str,
    env: Any = None,
    *,
    fps: float | None = None,
    frames: bool | None = None,
    allow_calls: bool = False,
    **keywords: Any,
) -> CoreServer:
    """Publish a recorded episode as a real-time world for spectators.

    Args:
        episode: The episode, or `FOLDER/ID`.
        env: As for `EpisodeEnv`.
        fps: Frames per second at speed 1; None: as recorded, or 30.
        frames: True for pictures; None: if they are possible.
        allow_calls: As for `Replay`.
        keywords: Keywords of `serve_gym`.

    Raises:
        RecordingError: The episode does not exist, or has no recorded observations and cannot be replayed.
        SettingError: Making its environment failed.
    """
    found = episode if isinstance(episode, RecordedEpisode) else open_episode(episode)
    mode = None if frames is False else "rgb_array"
    try:
        # A problem is reported here, to the caller, rather than to each spectator.
        begun(found, env, mode, allow_calls=allow_calls).close()
    except (RecordingError, SettingError):
        if frames is not None:
            raise
        mode = None  # it cannot be drawn
        begun(found, env, None, allow_calls=allow_calls).close()
    rate = fps or found.fps or 30.0

    def make(render_mode: str | None = None) -> EpisodeEnv:
        """Make the environment; a client's render mode is ignored."""
        return EpisodeEnv(found, env, mode, allow_calls=allow_calls)

    # It has no players, so spectators may call `seek` and set `speed`.
    auth = dataclasses.replace(keywords.pop("auth", None) or Auth(), shared_control=True)
    server: CoreServer = provided("serve_gym")(make, fps=rate, auth=auth, **keywords)
    return server
