"""The program's end of a game: `Game`, which `serve_game` returns."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import numpy as np
from gymnasium import spaces
from typing_extensions import Self

from bridge.core.encoding.spaces import Layout, check_structure
from bridge.core.logs import warn
from bridge.core.worlds.base import environment_failure
from bridge.core.worlds.environment import Spaces, kept
from bridge.core.worlds.group import ONE
from bridge.core.worlds.rewards import as_number
from bridge.errors import ClosedError, ConcurrentUseError, RequestError, SettingError, TensorError
from bridge.game.handover import News, ProgramEnd

__all__ = ["Game"]

_GRACE = 1.0
"""Seconds in which agents are told of an exception of the program."""
_IGNORED = 1.0
"""Seconds after which a program that has not read that a round begins is told so."""


class Game:
    """A program with a loop of its own, whose agents act over the network. `serve_game` returns it.

    `exchange` is for one thread, the one that called it first, until that thread has ended; with `wait=True` threads
    may take turns, as those of `asyncio.to_thread` do. As a context manager, a game closes itself; an exception that
    leaves the block ends the episodes of its agents, which are told its text.

    Args:
        server: Serves the game's world.
        handover: Takes what `exchange` passes, and holds the next actions.
        agents: Observation and action space of each agent, by name.
        several: True if what is passed is a dict by agent name.
        timeout: Seconds that `exchange(wait=True)` waits for an action; None: without limit.
    """

    def __init__(
        self,
        server: Any,
        handover: ProgramEnd,
        agents: Mapping[str, Spaces],
        several: bool,
        timeout: float | None,
    ) -> None:
        self.server = server
        """The server, with methods such as `stop`, `status` and `dial`."""
        self._handover = handover
        self._layouts = {name: Layout(pair[0], "observation") for name, pair in agents.items()}
        self._several = several
        self._timeout = timeout
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._calling = threading.RLock()
        """Held by the thread that calls. It is reentrant, because an interrupt may leave it held."""
        self._inside = False
        """True while a call runs."""
        self._begins = self._seen = False
        self._over: set[str] = set()
        """The agents whose round is over."""
        self._ended = False
        """True if the program has ended the last round."""

    # Addresses

    @property
    def url(self) -> str:
        """The URL that a client on this machine connects to, with the token if the server generated one."""
        return str(self.server.url)

    @property
    def web_url(self) -> str | None:
        """The URL of the page; None: there is no page."""
        found: str | None = self.server.web_url
        return found

    # Rounds and exchanges

    @property
    def begins(self) -> bool:
        """True if a new round begins: `exchange` returned None, and the next call passes its first observation.

        The program begins the round with `seed` and `options`. The old round goes on until the program reads this.
        """
        self._seen = True
        return self._begins

    @property
    def seed(self) -> int | None:
        """The seed of the new round, for the program's random generators; None: no seed was given."""
        taken = self._handover.taken
        return None if taken is None else taken.seed

    @property
    def options(self) -> Mapping[str, Any] | None:
        """The options of the new round; None: no options were given."""
        taken = self._handover.taken
        return None if taken is None else taken.options

    def exchange(
        self,
        observation: Any,
        reward: Any = 0.0,
        *,
        terminated: bool | Mapping[str, bool] = False,
        truncated: bool | Mapping[str, bool] = False,
        info: Mapping[str, Any] | None = None,
        frame: Any = None,
        wait: bool = False,
    ) -> Any:
        """Pass the result of the last action, and return the next action.

        For several agents, `observation`, `info` and the returned actions are dicts by agent name; `reward` and the
        flags may be dicts too. An agent without an observation has left the round.

        Args:
            observation: An element of the observation space; it is copied. Values of a Box may have another dtype
                that can be cast, such as float64 for float32. The bounds of a Box are not checked.
            reward: The reward since the last call, a number. NaN and infinity are passed on unchanged.
            terminated: True if the round ended by the game's own rules, such as when the player dies.
            truncated: True if the round was cut off, such as by a time limit.
            info: More information for agents, a dict.
            frame: The picture that people see, uint8 `(height, width, 3)`; it is copied. None: the last picture stays.
            wait: True: wait until the agent has acted or has asked for a round. After the game's `timeout`,
                go on with the default action. Must be the same in each call.

        Returns:
            The newest action, an element of the action space; the default action until somebody acts. None if `begins`
            is True: this call ended the old round, and the next call begins the new one. The reward of that next call
            is ignored.

        Raises:
            SettingError: A value does not fit its space, a round ends that has not begun, or `wait` differs from
                earlier calls.
            ConcurrentUseError: Another thread is in it, or called it before without `wait` and has not ended; or a
                signal handler called it within another call.
            ClosedError: The game was closed, or belongs to the parent process that forked this one.
        """
        self._check_call(wait)
        if not self._calling.acquire(blocking=False):
            raise ConcurrentUseError(
                "exchange() was called while another thread was in it: expected one call at a time; one that waits "
                "goes on until an agent has acted, its timeout is over, or close() ends it"
            )
        try:
            if self._inside:
                raise ConcurrentUseError(
                    "exchange() was called within a call of exchange(), by a signal handler: expected one call at a "
                    "time; let the handler set a variable, and call exchange() in the program's loop"
                )
            self._inside = True
            try:
                return self._exchange(observation, reward, terminated, truncated, info, frame, wait)
            finally:
                self._inside = False
        finally:
            self._calling.release()

    def _exchange(
        self, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any, frame: Any, wait: bool
    ) -> Any:
        news = self._read(observation, reward, terminated, truncated, info, frame)
        if self._begins and not self._seen:
            if time.monotonic() - self._handover.last > _IGNORED:
                warn(
                    f"a round begins, which the program has not noticed for {_IGNORED:g} s: exchange() returns None; "
                    "expected it to read game.begins, and to pass the first observation of the round then"
                )
            return None
        first = self._handover.taken is None
        news.frames, news.first, news.waits = int(not (first or self._begins)), self._begins, bool(wait)
        if news.first:
            news.rewards = dict.fromkeys(news.rewards, 0.0)
        ends = not first and not news.alive
        choice = self._handover.exchange(news, first or ends, None if first else self._timeout)
        # Only now: Ctrl-C may interrupt a wait, and the next call continues that wait.
        self._begins, self._seen, self._ended = choice.actions is None, False, ends
        if news.first or self._begins:
            self._over.clear()
        if choice.actions is None:
            return None
        self._over.update(_ended(news))
        actions = kept(dict(choice.actions))
        return {name: actions[name] for name in news.alive} if self._several else actions[ONE]

    def close(self) -> None:
        """End the game: the running episode is truncated, and the server stops once agents have been told.

        May be called twice, and by any thread: an `exchange` that waits in another thread raises ClosedError. In a
        forked process it does nothing: the game belongs to the parent process.
        """
        if os.getpid() == self._process:
            self._handover.close()
            self.server.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and os.getpid() == self._process:
            remedy = "The game has ended: fix its program, run it again, and connect again."
            self._handover.close(environment_failure("its loop", error, remedy=remedy))
            self.server.stop(_GRACE)  # so that the next Steps are answered with the text of the exception
        else:
            self.close()

    def __repr__(self) -> str:
        return f"Game({self.server!r})"

    # Reading what `exchange` was given

    def _check_call(self, wait: bool) -> None:
        if os.getpid() != self._process:
            raise ClosedError("this game belongs to the parent process: call serve_game() to make one in this process")
        self._handover.refuse_closed()
        thread = threading.current_thread()
        if self._thread is not thread and self._thread not in threading.enumerate():
            self._thread = thread  # the first one, or the earlier one has ended, such as that of a threading.Timer
        if self._thread is not thread and not wait:  # of two loops each would get half of the actions, and never know
            raise ConcurrentUseError(
                "exchange() was called by two threads: expected the one that called it first, until it has ended; only "
                "with wait=True may threads take turns"
            )
        if self._handover.waits not in (None, bool(wait)):
            raise SettingError(f"expected wait={self._handover.waits} in each call of exchange(), got {wait!r}")

    def _read(self, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any, frame: Any) -> News:
        """Check and copy the arguments of `exchange`; raises SettingError."""
        observations = self._by_agent("observation", observation, self._element)

        def each(what: str, given: Any, read: Callable[[str, Any], Any]) -> dict[str, Any]:
            """Read a value for each agent with an observation; one plain value counts for all of them."""
            alone = self._several and not isinstance(given, Mapping)
            return self._by_agent(what, dict.fromkeys(observations, given) if alone else given, read)

        news = News(
            time.monotonic(),
            observations=observations,
            rewards=each("reward", reward, _number),
            terminated=each("terminated", terminated, _flag),
            truncated=each("truncated", truncated, _flag),
            infos={} if info is None else self._by_agent("info", info, _info),
            frame=None if frame is None else _picture(frame),
        )
        ended = _ended(news)
        over = set() if self._begins and self._seen else self._over
        if ended and self._begins and (self._seen or self._ended):
            raise SettingError(
                "terminated or truncated was passed twice: expected it once, with the last observation of a round, and "
                "then the first observation of the next one, when game.begins is True"
            )
        if twice := sorted(ended & over):
            raise SettingError(f"the round of {', '.join(twice)} is over already: expected terminated once in a round")
        news.alive = [name for name in observations if name not in over | ended]
        return news

    def _by_agent(self, what: str, given: Any, read: Callable[[str, Any], Any]) -> dict[str, Any]:
        """Read a value for each agent; raises SettingError."""
        by_name = given if self._several else {ONE: given}
        names = ", ".join(self._layouts)
        if not isinstance(by_name, Mapping):
            raise SettingError(f"expected {what} to be a dict by the agents {names}, got {given!r:.80}")
        if unknown := [name for name in by_name if name not in self._layouts]:
            raise SettingError(f"expected {what} by the agents {names}, got one of {unknown[0]!r:.80}")
        return {name: read(name, of) for name, of in by_name.items()}

    def _element(self, name: str, given: Any) -> Any:
        """Return a copy of an observation in the form of its space; raises SettingError if it is not an element.

        The bounds of a Box are not checked: for a picture that would take longer than the rest of a frame.
        """
        layout = self._layouts[name]
        try:
            check_structure(layout.space, given, layout.name)
            parts = [part.copy("K") for part in layout.pack(given, rounding=True)]
            for leaf, part in zip(layout.leaves, parts, strict=True):
                if not isinstance(leaf.space, spaces.Box):
                    leaf.check(leaf.unpack(part))
            return layout.unpack(parts)
        except TensorError as error:
            what = f"the observation of {name!r}" if self._several else "observation"
            raise SettingError(f"expected {what} in {layout.space}: {error}") from None


def _ended(news: News) -> set[str]:
    """Return the agents whose round ends with this news."""
    return {name for flags in (news.terminated, news.truncated) for name, flag in flags.items() if flag}


def _number(name: str, reward: Any) -> float:
    try:
        value = reward.item() if isinstance(reward, np.ndarray) and reward.size == 1 else reward
        if not isinstance(value, (str, bytes)):  # `float` would parse them
            return as_number(value)
    except RequestError:
        pass
    raise SettingError(f"expected reward to be a number, got {reward!r:.80}")


def _flag(name: str, flag: Any) -> bool:
    if type(flag) is not bool and (np.ndim(flag) or np.asarray(flag).dtype.kind not in "bui"):
        raise SettingError(f"expected terminated and truncated to be True or False, got {flag!r:.80}")
    return bool(flag)


def _info(name: str, info: Any) -> Any:
    if not isinstance(info, Mapping):
        raise SettingError(f"expected info to be a dict, got {info!r:.80}")
    try:
        return kept(dict(info))
    except RecursionError:
        raise SettingError(
            "expected info to be a dict without cycles, got one that contains itself; pass a copy of its values"
        ) from None


def _picture(given: Any) -> Any:
    try:
        frame = np.array(given, order="K")  # keeps the memory order: a copy in another order takes ten times as long
    except ValueError:  # lists of different lengths
        frame = np.zeros(())
    if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3 or not frame.size:
        got = f"{frame.dtype} {frame.shape}" if frame.shape else f"{given!r:.80}"
        text = f"expected frame as uint8 (height, width, 3), got {got}"
        if type(given).__name__ == "Surface":  # by name: pygame may not be installed
            text += "; of a pygame Surface: pygame.surfarray.array3d(surface).swapaxes(0, 1)"
        raise SettingError(text)
    return frame
