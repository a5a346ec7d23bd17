"""How good a policy is on served environments: exactly so many episodes, a seed each, however many slots run them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
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
_ARRAYS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_INFOS = ("valid", "error", "moved", "intervention", "is_success", "success")


class Interval(NamedTuple):
    """A mean, and the ends of its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.4g} (95 %: {self.low:.4g} to {self.high:.4g})"


@dataclasses.dataclass
class EvaluatedEpisode:
    """One episode of an evaluation."""

    number: int
    """From 0 on."""
    seed: int
    """The seed of its reset: the evaluation's seed plus the number."""
    total: float = 0.0
    """The sum of its rewards."""
    length: int = 0
    """Its steps."""
    success: bool | None = None
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
    steps: int
    """All steps, those of lost episodes included."""
    lost: tuple[str, ...]
    """Each episode that was begun again: its number and seed, and why."""

    @property
    def returns(self) -> Array:
        """The return of each episode: float64 `(episodes,)`."""
        return _measures(self.episodes)["return"]

    @property
    def seconds_waiting(self) -> float:
        """How long no call of the policy was under way: environments, their network, and the loop between them."""
        return self.seconds - self.seconds_in_policy

    def intervals(self) -> dict[str, Interval]:
        """Return the mean return, length and, where infos tell it, success, with their bootstrap intervals."""
        return {name: _interval(values) for name, values in _measures(self.episodes).items()}

    def summary(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        return {
            **{name: interval._asdict() for name, interval in self.intervals().items()},
            "steps_per_second": self.steps / self.seconds,
            "share_policy": self.seconds_in_policy / self.seconds,
            "share_policy_network": self.seconds_in_policy_network / self.seconds,
            "share_environment_and_network": self.seconds_waiting / self.seconds,
            **dataclasses.asdict(self),
        }

    def __str__(self) -> str:
        lines = [f"{len(self.episodes)} episodes, {self.steps} steps in {self.seconds:.1f} s"]
        lines += [f"{name:8} {interval}" for name, interval in self.intervals().items()]
        rate, share = self.steps / self.seconds, self.seconds_in_policy / self.seconds
        lines.append(f"time     {rate:.0f} steps/s, policy {share:.0%}, environments and network {1 - share:.0%}")
        by_others = [f"{episode.number} ({episode.corrected} steps)" for episode in self.episodes if episode.corrected]
        if by_others:  # they say how good both are together: who reads the means has to know
            lines.append(f"others   acted in the policy's place in episode {', '.join(by_others)}")
        return "\n".join([*lines, *(f"again    {text}" for text in self.lost)])


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two policies on the same seeds."""

    first: Evaluation
    second: Evaluation

    @functools.cached_property
    def difference(self) -> Interval:
        """The mean of the second's returns less the first's, seed by seed, with its bootstrap interval."""
        return _interval(self.second.returns - self.first.returns)

    @property
    def beyond_chance(self) -> bool:
        """True where the interval of the difference has no zero in it."""
        return self.difference.low > 0 or self.difference.high < 0

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
    means = [generator.choice(values, len(values)).mean() for _ in range(_RESAMPLES)]
    low, high = np.percentile(means, (2.5, 97.5))
    return Interval(float(values.mean()), float(low), float(high))


class _Part:
    """Some slots, which step together: while one part's environments step, the policy acts for the other part."""

    def __init__(self, envs: Any, number: int, work: _Work) -> None:
        self.envs, self.work = envs, work
        self.slots = number + 2 * np.arange(envs.num_envs)
        """Their names for the policy, which are no other part's."""
        self.episodes: list[EvaluatedEpisode | None] = [None] * envs.num_envs
        self.filler = envs.action_space.sample()

    def play(self) -> Iterator[None]:
        """Play episodes, and yield for the other part's turns; slots without an episode are stepped, too."""
        self._begin(range(len(self.slots)))
        while True:
            active = [row for row, episode in enumerate(self.episodes) if episode is not None]
            batch = take(self.observations, active)
            answer: Callable[[], Any] = functools.partial(self.work.call_policy, batch, self.slots[active])
            # A served policy works on its own: the other part's turn is its time to answer, and by then that part has
            # asked, too, so that the policy never waits. A function works in `_act`, and the other part's turn, with
            # its call, is the time in which this part's environments step.
            if self.work.is_served:
                answer = self.work.thread.submit(answer).result if active else answer
                yield
                self._act(active, answer)
            else:
                self._act(active, answer)
                yield
            self._observe()

    def _begin(self, rows: Sequence[int]) -> None:
        """Reset slots, for episodes that wait with their seeds; the next step tells which are lost by it."""
        seeds: list[int | None] = [None] * len(self.slots)
        for row in rows[: len(self.work.queue)]:
            self.episodes[row] = episode = self.work.queue.popleft()
            seeds[row] = episode.seed
        if self.work.is_served:
            self.work.policy.reset(self.slots[rows])
        mask = np.isin(np.arange(len(self.slots)), rows)
        self.observations, _ = self.envs.reset(seed=seeds, options={"reset_mask": mask})

    def _act(self, active: list[int], answer: Callable[[], Any]) -> None:
        """Send actions: of the policy for slots with an episode, any for the others."""
        actions = self.filler.copy()
        if active:
            given, replaced = np.asarray(answer()), actions[active]
            if given.shape != replaced.shape or not np.can_cast(given.dtype, replaced.dtype, "same_kind"):
                raise InvalidActionError(
                    f"expected the policy to return {replaced.dtype} actions of {replaced.shape} for "
                    f"{len(active)} observations, got {given.dtype} of {given.shape}"
                )
            actions[active] = given
        self.envs.step_async(actions)

    def _observe(self) -> None:
        """Take the results of the step, and begin episodes that wait in slots that are free."""
        self.observations, rewards, terminations, truncations, infos = self.envs.step_wait()
        valid, errors, moved, acted, *successes = (_told(infos, name, len(self.slots)) for name in _INFOS)
        for row, episode in enumerate(self.episodes):
            if episode is None:
                continue
            if not valid[row] or errors[row] is not None or moved[row]:
                self.episodes[row] = None
                self.work.lose(episode, str(errors[row] or "its server was left"))
                continue
            episode.total += float(rewards[row])
            episode.length += 1
            episode.corrected += bool(acted[row])
            self.work.steps += 1
            if terminations[row] or truncations[row]:
                episode.success = next((bool(told[row]) for told in successes if told[row] is not None), None)
                self.episodes[row] = None
                self.work.done[episode.number] = episode
                self.work.progress(len(self.work.done), self.work.total)
        # Others that are free begin episodes by themselves, which do not count.
        free = [row for row, episode in enumerate(self.episodes) if episode is None and valid[row]]
        if free and self.work.queue:
            self._begin(free[: len(self.work.queue)])


class _Work:
    """The episodes to be played, what came of them, and the policy; the arguments are those of `evaluate`."""

    def __init__(self, policy: Any, episodes: int, seed: int, progress: Callable[[int, int], None] | None) -> None:
        self.policy, self.total, self.progress = policy, episodes, progress or (lambda done, total: None)
        self.is_served = isinstance(policy, RemotePolicy)
        self.thread = ThreadPoolExecutor(1)
        """Calls a served policy."""
        self.queue = deque(EvaluatedEpisode(number, seed + number) for number in range(episodes))
        self.done: dict[int, EvaluatedEpisode] = {}
        self.losses = Counter[int]()
        self.lost: list[str] = []
        self.steps, self.in_policy = 0, 0.0

    def call_policy(self, batch: Any, slots: Array) -> Any:
        """Return the policy's actions for a batch of observations, of these slots."""
        began = time.perf_counter()
        actions = self.policy(batch, slots=slots) if self.is_served else self.policy(batch)
        self.in_policy += time.perf_counter() - began
        return actions

    def lose(self, episode: EvaluatedEpisode, why: str) -> None:
        """Let an episode be begun again before all others; raise RemoteError where that was done too often."""
        self.losses[episode.number] += 1
        self.lost.append(f"episode {episode.number} (seed {episode.seed}): {why}")
        if self.losses[episode.number] >= _ATTEMPTS:
            text = f"{self.lost[-1]}; it was begun {_ATTEMPTS} times. Look at the server's log"
            raise RemoteError("evaluation", text)
        self.queue.appendleft(EvaluatedEpisode(episode.number, episode.seed))

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
                    for episode in filter(None, part.episodes):
                        self.lose(episode, str(error))


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
        work = _Work(policy, episodes, seed, progress)
        opened.enter_context(work.thread)
        if web_port is not None:
            from bridge.gateway import serve_gateway  # it needs an extra, which evaluations do not

            shown = {name: keywords[name] for name in ("token", "token_file", "tls") if name in keywords}
            credentials = ClientCredentials.of(**shown)
            opened.enter_context(serve_gateway(urls, port=web_port, upstream=credentials, note=work.results))
        parts = [_Part(envs, at, work) for at, envs in enumerate(_connect(opened, urls, num_envs, record, keywords))]
        before = policy.seconds_in_function if isinstance(policy, RemotePolicy) else 0.0
        began = time.perf_counter()
        work.play(parts)
        seconds = time.perf_counter() - began
    in_function = policy.seconds_in_function - before if isinstance(policy, RemotePolicy) else work.in_policy
    network = max(0.0, work.in_policy - in_function)
    found = tuple(work.done[number] for number in range(episodes))
    return Evaluation(found, seconds, work.in_policy, network, work.steps, tuple(work.lost))


def _connect(
    opened: contextlib.ExitStack, urls: Any, num_envs: int | None, record: Any, keywords: dict[str, Any]
) -> list[Any]:
    """Return the environments in two parts, or in one where they cannot be divided; `opened` closes them."""
    halves: list[tuple[Any, int | None]] = []
    if not isinstance(urls, str) and len(urls) > 1 and num_envs in (None, len(urls)):
        halves = [(urls[0::2], None), (urls[1::2], None)]
    elif num_envs is not None and num_envs > 1:
        halves = [(urls, num_envs - num_envs // 2), (urls, num_envs // 2)]
    with contextlib.suppress(SettingError):  # where worlds have too many lanes for half of the slots
        if halves:
            return [_made(opened, *half, record, keywords) for half in halves]
    return [_made(opened, urls, num_envs, record, keywords)]


def _made(opened: contextlib.ExitStack, urls: Any, num_envs: int | None, record: Any, keywords: dict[str, Any]) -> Any:
    """Connect to the environments of a part."""
    envs: Any = make_vec_remote(
        urls, num_envs=num_envs, blocking=True, on_lost="continue", max_failures=None, **keywords
    )
    opened.callback(envs.close)
    if envs.metadata["autoreset_mode"] is not AutoresetMode.NEXT_STEP:
        raise SettingError(f"expected lanes that can be reset alone, with a seed each; those of {urls!r} cannot")
    if not isinstance(envs.single_action_space, _ARRAYS):
        raise SettingError(f"expected an action space of arrays, got {envs.single_action_space}")
    if not isinstance(envs.single_observation_space, (*_ARRAYS, spaces.Dict)):
        raise SettingError(f"expected observations of arrays, or dicts of them, got {envs.single_observation_space}")
    if record is not None:
        from bridge.recording.recorder import Recorder  # it needs an extra, which evaluations do not

        envs = Recorder(envs, record, observations=True)
        opened.callback(envs.close)
    return envs


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
