"""How good a policy is on served environments: exactly so many episodes, a seed each, however many slots run them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from bridge.client.make import make_vec_remote
from bridge.encoding.tensors import Array
from bridge.errors import EnvironmentFailedError, InvalidActionError, RemoteError, SettingError
from bridge.keywords import check_counts
from bridge.policies.remote_policy import RemotePolicy
from bridge.policies.rows import take
from bridge.transport.credentials import ClientCredentials

__all__ = ["Comparison", "EvaluatedEpisode", "Evaluation", "compare", "evaluate"]

_RESAMPLES = 10_000
_ATTEMPTS = 5
"""How often an episode is begun before its losses end the evaluation."""
_OBSERVATIONS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Dict)
_FREE = -1
"""Stands for the number of an episode, in a slot that plays none."""
_INFOS = ("error", "moved", "intervention", "is_success", "success")


class Interval(NamedTuple):
    """A mean, and the ends of its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.4g} (95 %: {self.low:.4g} to {self.high:.4g})"


@dataclasses.dataclass(frozen=True)
class EvaluatedEpisode:
    """One episode of an evaluation."""

    number: int
    """From 0 on."""
    seed: int
    """The seed of its reset: the evaluation's seed plus the number."""
    total: float
    """The sum of its rewards."""
    length: int
    """Its steps."""
    success: bool | None
    """`is_success` or `success` of its last info; None: there is neither."""
    corrected: int = 0
    """The steps in which somebody else acted in the policy's place: a person who took over in the browser."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The results of a policy's episodes, in the order of their numbers."""

    episodes: tuple[EvaluatedEpisode, ...]
    seconds: float
    """How long it took."""
    seconds_in_policy: float
    """How long the policy's calls took, its network included."""
    seconds_in_policy_network: float
    """The part of these that a served policy's function did not take."""
    seconds_waiting: float
    """How long the loop waited for environments and their network, while no policy was at work."""
    steps: int
    """All steps, those of lost episodes included."""
    lost: tuple[str, ...]
    """Each episode that was begun again: its number and seed, and why."""

    @property
    def returns(self) -> Array:
        """The return of each episode: float64 `(episodes,)`."""
        return _measures(self.episodes)["return"]

    def intervals(self) -> dict[str, Interval]:
        """Return the mean return, length and, where infos tell it, success, with their bootstrap intervals."""
        return {name: _interval(values) for name, values in _measures(self.episodes).items()}

    def summary(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        return {
            **{name: interval._asdict() for name, interval in self.intervals().items()},
            "seconds": self.seconds,
            "steps_per_second": self.steps / self.seconds,
            "share_policy": self.seconds_in_policy / self.seconds,
            "share_policy_network": self.seconds_in_policy_network / self.seconds,
            "share_environment_and_network": self.seconds_waiting / self.seconds,
            "lost": list(self.lost),
            "episodes": [dataclasses.asdict(episode) for episode in self.episodes],
        }

    def __str__(self) -> str:
        lines = [f"{len(self.episodes)} episodes, {self.steps} steps in {self.seconds:.1f} s"]
        lines += [f"{name:8} {interval}" for name, interval in self.intervals().items()]
        lines.append(
            f"time     {self.steps / self.seconds:.0f} steps/s, policy {self.seconds_in_policy / self.seconds:.0%}, "
            f"environments and network {self.seconds_waiting / self.seconds:.0%}"
        )
        by_others = [f"{episode.number} ({episode.corrected} steps)" for episode in self.episodes if episode.corrected]
        if by_others:  # they say how good both are together: who reads the means has to know
            lines.append(f"others   acted in the policy's place in episode {', '.join(by_others)}")
        return "\n".join([*lines, *(f"again    {text}" for text in self.lost)])


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two policies on the same seeds."""

    first: Evaluation
    second: Evaluation

    @property
    def difference(self) -> Interval:
        """The mean of the second's returns less the first's, seed by seed, with its bootstrap interval."""
        return _interval(self.second.returns - self.first.returns)

    @property
    def beyond_chance(self) -> bool:
        """True where the interval of the difference has no zero in it."""
        difference = self.difference
        return difference.low > 0 or difference.high < 0

    def summary(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        both = {"first": self.first.summary(), "second": self.second.summary()}
        return {"difference": self.difference._asdict(), "beyond_chance": self.beyond_chance, **both}

    def __str__(self) -> str:
        verdict = "larger than chance" if self.beyond_chance else "not larger than chance"
        return f"the second less the first, seed by seed: {self.difference}: {verdict}"


def _measures(episodes: Sequence[EvaluatedEpisode]) -> dict[str, Array]:
    """Return what is measured of each episode, float64; without success where no info told it."""
    found = {
        "return": [episode.total for episode in episodes],
        "length": [episode.length for episode in episodes],
        "success": [episode.success for episode in episodes if episode.success is not None],
    }
    return {name: np.array(values, np.float64) for name, values in found.items() if values}


def _interval(values: Array) -> Interval:
    """Return a mean and its interval by the percentile bootstrap, always the same for the same values."""
    generator = np.random.default_rng(0)
    # Value by value of a small block: 10,000 resamples of a long evaluation at once would take gigabytes.
    blocks = [
        values[generator.integers(0, len(values), (100, len(values)))].mean(axis=1) for _ in range(_RESAMPLES // 100)
    ]
    low, high = np.percentile(np.concatenate(blocks), (2.5, 97.5))
    return Interval(float(values.mean()), float(low), float(high))


class _Part:
    """Some slots, which step together: while one part's environments step, the policy acts for the other part."""

    def __init__(self, envs: Any, first: int, work: _Work) -> None:
        self.envs, self.work = envs, work
        self.slots = np.arange(first, first + envs.num_envs)
        self.episodes = np.full(envs.num_envs, _FREE)
        self.totals, self.lengths, self.corrected = np.zeros((3, envs.num_envs))
        self.filler = np.stack([envs.single_action_space.sample()] * envs.num_envs)

    def play(self) -> Iterator[None]:
        """Play episodes, and yield for the other part's turns; slots without an episode are stepped, too."""
        self._begin(np.ones(len(self.slots), np.bool_))
        while True:
            self._ask()
            # A served policy works on its own: the other part's turn is its time to answer, and by then that part has
            # asked, too, so that the policy never waits. A function works in `_ask`, and the other part's turn, with
            # its call, is the time in which this part's environments step.
            if self.work.is_served:
                yield
                self._act()
            else:
                self._act()
                yield
            self._observe()

    def _begin(self, chosen: Array) -> None:
        """Reset slots, for episodes that wait with their seeds."""
        seeds: list[int | None] = [None] * len(self.slots)
        for row in np.flatnonzero(chosen)[: len(self.work.queue)].tolist():
            self.episodes[row] = number = self.work.queue.popleft()
            seeds[row] = self.work.seed + number
        self.totals[chosen] = self.lengths[chosen] = self.corrected[chosen] = 0
        began = time.perf_counter()
        self.observations, infos = self.envs.reset(seed=seeds, options={"reset_mask": chosen})
        self.work.waited_since(began)
        self.fresh, self.usable = self.slots[chosen], np.asarray(infos["valid"])
        for row in np.flatnonzero((self.episodes != _FREE) & ~self.usable).tolist():
            self.lose(row, "the server went while it was reset")

    def _ask(self) -> None:
        """Ask the policy for the actions of slots with an episode."""
        self.active = np.flatnonzero(self.episodes != _FREE)
        if len(self.active):
            slots = self.slots[self.active].tolist()
            self.answer = self.work.ask(take(self.observations, self.active), slots, self.fresh.tolist())

    def _act(self) -> None:
        """Send actions: of the policy for slots with an episode, any for the others."""
        actions = self.filler.copy()
        if len(self.active):
            given, replaced = np.asarray(self.answer()), actions[self.active]
            if given.shape != replaced.shape or not np.can_cast(given.dtype, replaced.dtype, "same_kind"):
                raise InvalidActionError(
                    f"expected the policy to return {replaced.dtype} actions of {replaced.shape} for "
                    f"{len(self.active)} observations, got {given.dtype} of {given.shape}"
                )
            actions[self.active] = given
        self.envs.step_async(actions)

    def _observe(self) -> None:
        """Take the results of the step, and begin episodes that wait in slots that are free."""
        began = time.perf_counter()
        self.observations, rewards, terminations, truncations, infos = self.envs.step_wait()
        self.work.waited_since(began)
        self.fresh, self.usable = self.slots[:0], np.asarray(infos["valid"])
        errors, moved, acted, *successes = (_told(infos, name, len(self.slots)) for name in _INFOS)
        for row in np.flatnonzero(self.episodes != _FREE).tolist():
            if not self.usable[row] or errors[row] is not None or moved[row]:
                self.lose(row, str(errors[row] or "its server was left"))
        playing = self.episodes != _FREE
        self.work.steps += int(playing.sum())
        self.totals[playing] += rewards[playing]
        self.lengths[playing] += 1
        self.corrected[playing] += np.array(acted, np.bool_)[playing]
        for row in np.flatnonzero(playing & (terminations | truncations)).tolist():
            success = next((bool(told[row]) for told in successes if told[row] is not None), None)
            self.work.finish(self.episodes[row], self.totals[row], self.lengths[row], success, self.corrected[row])
            self.episodes[row] = _FREE
        # Others that are free begin episodes by themselves, which do not count.
        free = np.flatnonzero((self.episodes == _FREE) & self.usable)[: len(self.work.queue)]
        if len(free):
            self._begin(np.isin(np.arange(len(self.slots)), free))

    def lose(self, row: int, why: str) -> None:
        """Let a slot's episode, where it has one, be begun again before all others."""
        if self.episodes[row] != _FREE:
            self.work.lose(int(self.episodes[row]), why)
        self.episodes[row] = _FREE


class _Work:
    """The episodes to be played, what came of them, and the policy.

    Args:
        policy: As for `evaluate`, as are `episodes`, `seed` and `progress`.
        thread: Calls a served policy.
    """

    def __init__(
        self,
        policy: Any,
        episodes: int,
        seed: int,
        progress: Callable[[int, int], None] | None,
        thread: ThreadPoolExecutor,
    ) -> None:
        self.policy, self.total, self.seed, self.progress, self.thread = policy, episodes, seed, progress, thread
        self.is_served = isinstance(policy, RemotePolicy)
        self.queue = deque(range(episodes))
        self.done: dict[int, EvaluatedEpisode] = {}
        self.losses = Counter[int]()
        self.lost: list[str] = []
        self.steps = 0
        self.waiting = self.in_policy = 0.0
        self.idle_since: float | None = 0.0
        """When the policy's last call ended; None: one is under way."""

    def ask(self, batch: Any, slots: list[int], fresh: list[int]) -> Callable[[], Any]:
        """Call the policy: a served one in the thread, a function here. The function returned gives the actions.

        Args:
            batch: Observations.
            slots: Whose these are.
            fresh: Slots whose episodes began anew.
        """
        if self.is_served:
            return self.thread.submit(self._call, batch, slots, fresh).result
        actions = self._call(batch, slots, fresh)
        return lambda: actions

    def _call(self, batch: Any, slots: list[int], fresh: list[int]) -> Any:
        began, self.idle_since = time.perf_counter(), None
        try:
            if not self.is_served:
                return self.policy(batch)
            self.policy.reset(fresh)
            return self.policy(batch, slots=slots)
        finally:
            self.idle_since = time.perf_counter()
            self.in_policy += self.idle_since - began

    def waited_since(self, began: float) -> None:
        """Count the time of a wait for environments in which no policy was at work."""
        now, idle_since = time.perf_counter(), self.idle_since
        if idle_since is not None:
            self.waiting += now - max(began, idle_since)

    def finish(self, number: Any, total: Any, length: Any, success: bool | None, corrected: Any) -> None:
        """Keep an episode."""
        seed = self.seed + int(number)
        self.done[int(number)] = EvaluatedEpisode(int(number), seed, float(total), int(length), success, int(corrected))
        if self.progress is not None:
            self.progress(len(self.done), self.total)

    def lose(self, number: int, why: str) -> None:
        """Queue an episode again."""
        self.losses[number] += 1
        self.lost.append(f"episode {number} (seed {self.seed + number}): {why}")
        if self.losses[number] >= _ATTEMPTS:
            raise RemoteError(
                "evaluation", f"{self.lost[-1]}; it was begun {_ATTEMPTS} times. Look at the server's log"
            )
        self.queue.appendleft(number)

    def results(self) -> str:
        """Say what the finished episodes gave; any thread may ask."""
        means = [
            f"{name} {values.mean():{'.0%' if name == 'success' else '.4g'}}"
            for name, values in _measures([*self.done.values()]).items()
        ]
        parts = [f"{len(self.done)} of {self.total} episodes", *([f"mean {', '.join(means)}"] if means else [])]
        return ", ".join([*parts, *([f"{len(self.lost)} begun again"] if self.lost else [])])

    def play(self, parts: Sequence[_Part]) -> None:
        """Step the parts in turns until every episode is done; where a part has no server left, the others go on."""
        live = {part: part.play() for part in parts}
        while len(self.done) < self.total:
            for part, turns in tuple(live.items()):
                try:
                    next(turns)
                except RemoteError as error:
                    # A failure of the policy, or of an environment, would be the same on the other servers.
                    same = isinstance(error, EnvironmentFailedError) or error.url == getattr(self.policy, "url", "")
                    if same or len(live) == 1:
                        raise
                    del live[part]
                    for row in range(len(part.slots)):
                        part.lose(row, str(error))


def _told(infos: dict[str, Any], name: str, count: int) -> list[Any]:
    """Return an entry of each slot's info; None for slots that have none."""
    values: Any = infos.get(name)
    if np.shape(values)[:1] != (count,):
        return [None] * count
    there = infos.get(f"_{name}", np.ones(count, np.bool_))
    return [value if told else None for value, told in zip(values, there, strict=True)]


def evaluate(
    urls: str | Sequence[str],
    policy: Callable[..., Any],
    *,
    episodes: int = 50,
    seed: int = 0,
    num_envs: int | None = None,
    record: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    web_port: int | None = None,
    **keywords: Any,
) -> Evaluation:
    """Play exactly so many episodes on served environments, and say how good the policy was.

    Episode k is seeded `seed + k`, whichever slot plays it, so that the number of slots changes nothing; each counts,
    however long it takes. An episode whose server is lost is begun again, on any slot. Half of the slots step while
    the policy acts for the other half. The lanes of one world step together, and so are one half.

    Args:
        urls: As for `make_vec_remote`: a URL, a list of them, or a directory.
        policy: A `RemotePolicy`, or a function of a batch of observations, as for `serve_policy`.
        episodes: How many.
        seed: The first episode's.
        num_envs: How many slots; None: what the URLs give.
        record: A folder to record the episodes in, with their observations; the slots then wait for the policy.
        progress: Called with the number of finished episodes, and of all.
        web_port: Meanwhile show the worlds side by side, and the results so far, at `http://127.0.0.1:PORT`. The
            servers tell the page of their worlds where they are started with `web=True`.
        keywords: Others of `make_vec_remote`.

    Raises:
        SettingError: The environments cannot be reset alone, or have spaces that are no arrays.
        InvalidActionError: The policy returns other actions than the environments take.
        RemoteError: No server is left, or an episode was lost five times.
    """
    check_counts(episodes=episodes)
    if type(seed) is not int or seed < 0:
        raise SettingError(f"expected seed to be an integer from 0 on, got {seed!r}")
    with contextlib.ExitStack() as opened:
        work = _Work(policy, episodes, seed, progress, opened.enter_context(ThreadPoolExecutor(1)))
        if web_port is not None:
            from bridge.gateway import serve_gateway  # it needs an extra, which evaluations do not

            shown = {name: keywords[name] for name in ("token", "token_file", "tls") if name in keywords}
            credentials = ClientCredentials.of(**shown)
            opened.enter_context(serve_gateway(urls, port=web_port, upstream=credentials, note=work.results))
        parts = list[_Part]()
        for envs in _connect(opened, urls, num_envs, record, keywords):
            parts.append(_Part(envs, sum(len(part.slots) for part in parts), work))
        before = policy.seconds_in_function if isinstance(policy, RemotePolicy) else 0.0
        began = time.perf_counter()
        work.play(parts)
        seconds = time.perf_counter() - began
    network = 0.0
    if isinstance(policy, RemotePolicy):
        network = max(0.0, work.in_policy - (policy.seconds_in_function - before))
    found = tuple(work.done[number] for number in range(episodes))
    return Evaluation(found, seconds, work.in_policy, network, work.waiting, work.steps, tuple(work.lost))


def _connect(
    opened: contextlib.ExitStack, urls: Any, num_envs: int | None, record: Any, keywords: dict[str, Any]
) -> list[Any]:
    """Return the environments in two parts, or in one where they cannot be divided; `opened` closes them."""
    if not isinstance(urls, str) and len(urls) > 1 and num_envs in (None, len(urls)):
        return _made(opened, [(urls[0::2], None), (urls[1::2], None)], record, keywords)
    if num_envs is not None and num_envs > 1:
        # Where worlds have too many lanes for half of the slots, all of them are one part.
        with contextlib.suppress(SettingError):
            halves: list[tuple[Any, int | None]] = [(urls, num_envs - num_envs // 2), (urls, num_envs // 2)]
            return _made(opened, halves, record, keywords)
    return _made(opened, [(urls, num_envs)], record, keywords)


def _made(
    opened: contextlib.ExitStack, parts: list[tuple[Any, int | None]], record: Any, keywords: dict[str, Any]
) -> list[Any]:
    """Connect each part; where one cannot be, none stays connected."""
    found = []
    with contextlib.ExitStack() as made:
        for urls, count in parts:
            envs: Any = make_vec_remote(
                urls, num_envs=count, blocking=True, on_lost="continue", max_failures=None, **keywords
            )
            made.callback(envs.close)
            _check(envs, urls)
            if record is not None:
                from bridge.recording.recorder import Recorder  # it needs an extra, which evaluations do not

                envs = Recorder(envs, record, observations=True)
                made.callback(envs.close)
            found.append(envs)
        opened.push(made.pop_all())
    return found


def _check(envs: Any, urls: Any) -> None:
    if envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP:
        raise SettingError(
            f"expected lanes that can be reset alone, with a seed each; those of {urls!r} reset themselves"
        )
    if getattr(envs.single_action_space, "dtype", None) is None or envs.single_action_space.shape is None:
        raise SettingError(f"expected an action space of arrays, got {envs.single_action_space}")
    if not isinstance(envs.single_observation_space, _OBSERVATIONS):
        raise SettingError(f"expected observations of arrays, or dicts of them, got {envs.single_observation_space}")


def compare(
    urls: str | Sequence[str], first: Callable[..., Any], second: Callable[..., Any], **keywords: Any
) -> Comparison:
    """Evaluate two policies on the same seeds, one after the other.

    Args:
        urls: As for `evaluate`.
        first: A policy.
        second: Another one.
        keywords: As for `evaluate`.
    """
    return Comparison(evaluate(urls, first, **keywords), evaluate(urls, second, **keywords))
