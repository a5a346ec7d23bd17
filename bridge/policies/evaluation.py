"""How good a policy is on served environments: exactly so many episodes, a seed each, however many slots run them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from bridge.client.make import make_vec_remote
from bridge.errors import EnvironmentFailedError, InvalidActionError, RemoteError, SettingError
from bridge.policies.rows import take
from bridge.transport.credentials import ClientCredentials

__all__ = ["Comparison", "EvaluatedEpisode", "Evaluation", "compare", "evaluate"]

_RESAMPLES = 10_000
_ATTEMPTS = 5
"""How often an episode is begun before its losses end the evaluation."""
_OBSERVATIONS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Dict)

_MEANS = (("mean return", "total"), ("length", "length"))


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
    """How long the loop was in the policy, its network included."""
    seconds_in_policy_network: float
    """The part of these that a served policy's function did not take."""
    seconds_waiting: float
    """How long the loop waited for environments and their network, while no policy was at work."""
    steps: int
    """All steps, those of lost episodes included."""
    lost: tuple[str, ...]
    """Each episode that was begun again: its number and seed, and why."""

    @property
    def returns(self) -> np.ndarray[Any, Any]:
        """The return of each episode: float64 `(episodes,)`."""
        return np.array([episode.total for episode in self.episodes])

    def intervals(self) -> dict[str, Interval]:
        """Return the mean return, length and, where infos tell it, success, with their bootstrap intervals."""
        found = {"return": _interval(self.returns), "length": _interval(np.array([e.length for e in self.episodes]))}
        told = [episode.success for episode in self.episodes if episode.success is not None]
        return {**found, "success": _interval(np.array(told, np.float64))} if told else found

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


def _interval(values: np.ndarray[Any, Any]) -> Interval:
    """Return a mean and its interval by the percentile bootstrap, always the same for the same values."""
    generator = np.random.default_rng(0)
    # Value by value of a small block: 10,000 resamples of a long evaluation at once would take gigabytes.
    blocks = [
        values[generator.integers(0, len(values), (100, len(values)))].mean(axis=1) for _ in range(_RESAMPLES // 100)
    ]
    low, high = np.percentile(np.concatenate(blocks), (2.5, 97.5))
    return Interval(float(values.mean()), float(low), float(high))


@dataclasses.dataclass
class _Run:
    """An episode that a slot plays, or that waits for one."""

    number: int
    attempts: int = 0
    total: float = 0.0
    length: int = 0
    corrected: int = 0


class _Part:
    """Some slots, which step together: while one part's environments step, the policy acts for the other part."""

    def __init__(self, envs: Any, first: int, work: _Work, *, recorded: bool) -> None:
        self.envs, self.work, self.recorded = envs, work, recorded
        self.slots = np.arange(first, first + envs.num_envs)
        self.runs: list[_Run | None] = [None] * envs.num_envs
        self.filler = np.stack([envs.single_action_space.sample()] * envs.num_envs)
        self.observations: Any = None

    def start(self) -> None:
        """Begin the first episodes; slots for which there is none are reset without a seed."""
        self._reset(np.ones(len(self.slots), np.bool_))
        self._act()

    def turn(self) -> None:
        """Take the results of the last step, begin episodes, and send the next step."""
        self._gather()
        self._assign()
        self._act()

    def _assign(self) -> None:
        """Begin episodes that wait, in slots that are free; others begin episodes by themselves, which do not count."""
        free = np.array([run is None for run in self.runs]) & self.usable
        chosen = np.flatnonzero(free)[: len(self.work.queue)]
        if len(chosen):
            mask = np.zeros(len(self.slots), np.bool_)
            mask[chosen] = True
            self._reset(mask)

    def _reset(self, mask: np.ndarray[Any, Any]) -> None:
        seeds: list[int | None] = [None] * len(self.slots)
        for row in np.flatnonzero(mask).tolist():
            if self.work.queue:
                run = self.work.queue.popleft()
                self.runs[row] = _Run(run.number, run.attempts + 1)
                seeds[row] = self.work.seed + run.number
        began = time.perf_counter()
        observations, infos = self.envs.reset(seed=seeds, options={"reset_mask": mask})
        self.work.waiting += time.perf_counter() - began
        self.observations = observations if mask.all() else _replaced(self.observations, observations, mask)
        self.usable = np.asarray(infos["valid"])
        self.work.reset_policy(self.slots[mask])
        for row in np.flatnonzero(mask & ~self.usable).tolist():
            self.lose(row, "the server went while it was reset")

    def _act(self) -> None:
        """Send actions: of the policy for slots with an episode, any for the others."""
        active = [row for row, run in enumerate(self.runs) if run is not None]
        actions = self.filler.copy()
        if active:
            given = self.work.ask(take(self.observations, active), self.slots[active])
            if given.shape != actions[active].shape or not np.can_cast(given.dtype, actions.dtype, "same_kind"):
                raise InvalidActionError(
                    f"expected the policy to return {actions.dtype} actions of {actions[active].shape} for "
                    f"{len(active)} observations, got {given.dtype} of {given.shape}"
                )
            actions[active] = given
        if self.recorded:
            self.actions = actions  # it records whole steps, so that nothing overlaps
        else:
            self.envs.step_async(actions)

    def _gather(self) -> None:
        """Take the results of the step."""
        began = time.perf_counter()
        results = self.envs.step(self.actions) if self.recorded else self.envs.step_wait()
        self.observations, rewards, terminations, truncations, infos = results
        self.work.waiting += time.perf_counter() - began
        self.usable = np.asarray(infos["valid"])
        for row, run in enumerate(self.runs):
            if run is None:
                continue
            if not self.usable[row] or _of(infos, "error", row) is not None or _of(infos, "moved", row):
                self.lose(row, str(_of(infos, "error", row) or "its server was left"))
                continue
            run.total += float(rewards[row])
            run.length += 1
            run.corrected += bool(_of(infos, "intervention", row))
            self.work.steps += 1
            if terminations[row] or truncations[row]:
                told = [_of(infos, name, row) for name in ("is_success", "success")]
                success = next((bool(value) for value in told if value is not None), None)
                self.work.finish(run, success)
                self.runs[row] = None

    def lose(self, row: int, why: str) -> None:
        """Let an episode be begun again, before all others."""
        run, self.runs[row] = self.runs[row], None
        if run is not None:
            self.work.lose(run, why)


class _Work:
    """The episodes to be played, and what came of them."""

    def __init__(self, policy: Any, episodes: int, seed: int, progress: Callable[[int, int], None] | None) -> None:
        self.policy, self.seed, self.total, self.progress = policy, seed, episodes, progress
        self.queue = deque(_Run(number) for number in range(episodes))
        self.done: dict[int, EvaluatedEpisode] = {}
        self.lost: list[str] = []
        self.steps = 0
        self.waiting = self.in_policy = 0.0
        self.is_served = hasattr(policy, "seconds_in_function")
        """True of a `RemotePolicy`, which is told of slots."""

    @property
    def seconds_in_function(self) -> float:
        """How long a served policy's function took, ever."""
        return float(getattr(self.policy, "seconds_in_function", 0.0))

    def ask(self, batch: Any, slots: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Call the policy."""
        began = time.perf_counter()
        actions = self.policy(batch, slots=slots.tolist()) if self.is_served else self.policy(batch)
        self.in_policy += time.perf_counter() - began
        return np.asarray(actions)

    def reset_policy(self, slots: np.ndarray[Any, Any]) -> None:
        """Say that episodes began anew."""
        if self.is_served:
            self.policy.reset(slots.tolist())

    def finish(self, run: _Run, success: bool | None) -> None:
        """Keep an episode."""
        seed = self.seed + run.number
        self.done[run.number] = EvaluatedEpisode(run.number, seed, run.total, run.length, success, run.corrected)
        if self.progress is not None:
            self.progress(len(self.done), self.total)

    def results(self) -> str:
        """Say what the finished episodes gave; any thread may ask."""
        done = [*self.done.values()]
        if not done:
            return f"0 of {self.total} episodes"
        told = [episode.success for episode in done if episode.success is not None]
        means = [f"{name} {np.mean([getattr(episode, of) for episode in done]):.4g}" for name, of in _MEANS]
        means += [f"success {np.mean(told):.0%}"] if told else []
        again = [f"{len(self.lost)} begun again"] if self.lost else []
        return ", ".join([f"{len(done)} of {self.total} episodes", *means, *again])

    def lose(self, run: _Run, why: str) -> None:
        """Queue an episode again."""
        text = f"episode {run.number} (seed {self.seed + run.number}): {why}"
        self.lost.append(text)
        if run.attempts >= _ATTEMPTS:
            raise RemoteError("evaluation", f"{text}; it was begun {run.attempts} times. Look at the server's log")
        self.queue.appendleft(run)


def _of(infos: dict[str, Any], name: str, row: int) -> Any:
    """Return an entry of a slot's info; None: it has none."""
    return (
        infos[name][row] if name in infos and np.asarray(infos.get(f"_{name}", True)).ravel()[row:][:1].any() else None
    )


def _replaced(old: Any, new: Any, mask: np.ndarray[Any, Any]) -> Any:
    """Return a batch with the rows of a mask from another one."""
    if isinstance(old, dict):
        return {key: _replaced(old[key], new[key], mask) for key in old}
    replaced = np.array(old)
    replaced[mask] = new[mask]
    return replaced


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
    if type(episodes) is not int or episodes < 1:
        raise SettingError(f"expected episodes to be a positive integer, got {episodes!r}")
    if type(seed) is not int or seed < 0:
        raise SettingError(f"expected seed to be an integer from 0 on, got {seed!r}")
    work = _Work(policy, episodes, seed, progress)
    page: Any = contextlib.nullcontext()
    if web_port is not None:
        from bridge.gateway import serve_gateway  # it needs an extra, which evaluations do not

        shown = {name: keywords[name] for name in ("token", "token_file", "tls") if name in keywords}
        page = serve_gateway(urls, port=web_port, upstream=ClientCredentials.of(**shown), note=work.results)
    with page:
        return _evaluate(urls, num_envs, keywords, work, record)


def _evaluate(
    urls: Any, num_envs: int | None, keywords: dict[str, Any], work: _Work, record: str | os.PathLike[str] | None
) -> Evaluation:
    """Connect, and play the episodes."""
    parts = list[_Part]()
    before = work.seconds_in_function
    try:
        for envs in _connect(urls, num_envs, keywords):
            if record is not None:
                from bridge.recording.recorder import Recorder  # it needs an extra, which evaluations do not

                envs = Recorder(envs, record, observations=True)
            parts.append(_Part(envs, sum(len(part.slots) for part in parts), work, recorded=record is not None))
        began = time.perf_counter()
        _play(parts, work)
        seconds = time.perf_counter() - began
    finally:
        for part in parts:
            part.envs.close()
    network = max(0.0, work.in_policy - (work.seconds_in_function - before)) if work.is_served else 0.0
    found = tuple(work.done[number] for number in range(work.total))
    return Evaluation(found, seconds, work.in_policy, network, work.waiting, work.steps, tuple(work.lost))


def _play(parts: list[_Part], work: _Work) -> None:
    """Step the parts in turns until every episode is done; where a part has no server left, the others go on."""
    live, turn = list(parts), _Part.start
    while len(work.done) < work.total:
        for part in tuple(live):
            try:
                turn(part)
            except RemoteError as error:
                # A failure of the policy, or of an environment, would be the same on the other servers.
                same = isinstance(error, EnvironmentFailedError) or error.url == getattr(work.policy, "url", "")
                if same or len(live) == 1:
                    raise
                live.remove(part)
                for row in range(len(part.runs)):
                    part.lose(row, str(error))
        turn = _Part.turn


def _connect(urls: Any, num_envs: int | None, keywords: dict[str, Any]) -> list[Any]:
    """Return the environments in two parts, or in one where there is one world."""
    listed = isinstance(urls, (list, tuple))
    parts: list[tuple[Any, int | None]] = [(urls, num_envs)]
    if listed and len(urls) > 1 and num_envs in (None, len(urls)):
        parts = [(urls[0::2], None), (urls[1::2], None)]
    elif num_envs is not None and num_envs > 1:
        parts = [(urls, num_envs - num_envs // 2), (urls, num_envs // 2)]
    try:
        return _made(parts, keywords)
    except SettingError:
        if len(parts) == 1 or listed:
            raise
        return _made([(urls, num_envs)], keywords)  # its worlds have too many lanes for half of the slots


def _made(parts: list[tuple[Any, int | None]], keywords: dict[str, Any]) -> list[Any]:
    """Connect each part; where one cannot be, none stays connected."""
    found = []
    with contextlib.ExitStack() as opened:
        for part, count in parts:
            envs = make_vec_remote(
                part, num_envs=count, blocking=True, on_lost="continue", max_failures=None, **keywords
            )
            opened.callback(envs.close)
            _check(envs, part)
            found.append(envs)
        opened.pop_all()
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
