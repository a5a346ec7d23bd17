"""How good a policy is on served environments: exactly so many episodes, a seed each, however many slots run them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import iterate

from bridge.core.client.endpoints import Directory
from bridge.core.client.envs.vector_env import slots_of
from bridge.core.client.slots.slot import SlotState
from bridge.core.encoding.tensors import Array
from bridge.core.extras import feature, provided
from bridge.core.keywords import check_counts
from bridge.core.logs import counted
from bridge.core.transport.credentials import ClientCredentials, given_access
from bridge.errors import InvalidActionError, RemoteError, SettingError
from bridge.policies.remote_policy import RemotePolicy
from bridge.policies.rows import check_policy, put, take

__all__ = ["Comparison", "EvaluatedEpisode", "Evaluation", "compare", "evaluate"]

_RESAMPLES = 10_000
_ATTEMPTS = 5
"""How often an episode is begun before its losses end the evaluation."""
_ARRAYS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_INFOS = ("error", "moved", "intervention", "is_success", "success")


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
    """Its steps; in real time, the frames of the world."""
    success: bool | None = None
    """`is_success` or `success` of its last info; None: there is neither."""
    corrected: int = 0
    """The steps in which somebody else acted in the policy's place: a person who took over in the browser."""
    attempts: int = 1
    """How often it was begun: more than once where its server was lost."""


@dataclasses.dataclass
class Evaluation:
    """The results of a policy's episodes, in the order of their numbers."""

    episodes: list[EvaluatedEpisode] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    """How long it took."""
    seconds_in_policy: float = 0.0
    """How long the policy's calls took, its network included."""
    seconds_in_policy_network: float = 0.0
    """The part of these that a served policy's function did not take."""
    steps: int = 0
    """All steps, in real time all frames; those of lost episodes included."""
    missed: int = 0
    """In real time: the frames that passed before the policy had chosen an action for them."""
    lost: list[str] = dataclasses.field(default_factory=list)
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
            "steps_per_second": self.steps / self.seconds,
            "share_policy": self.seconds_in_policy / self.seconds,
            "share_policy_network": self.seconds_in_policy_network / self.seconds,
            "share_environment_and_network": 1 - self.seconds_in_policy / self.seconds,
            **dataclasses.asdict(self),
        }

    def __str__(self) -> str:
        played = f"{counted(len(self.episodes), 'episode')}, {counted(self.steps, 'step')}"
        lines = [f"{played} in {self.seconds:.1f} s"]
        lines += [f"{name:8} {interval}" for name, interval in self.intervals().items()]
        rate, share = self.steps / self.seconds, self.seconds_in_policy / self.seconds
        lines.append(f"time     {rate:.0f} steps/s, policy {share:.0%}, environments and network {1 - share:.0%}")
        if self.missed:  # a robot went on by an old action then: the policy is better than the result, if it is faster
            lines.append(f"missed   {self.missed} of {self.steps} frames, in which the last action went on: act faster")
        by_others = [
            f"{episode.number} ({counted(episode.corrected, 'step')})" for episode in self.episodes if episode.corrected
        ]
        if by_others:  # they say how good both are together: who reads the means has to know
            lines.append(f"others   acted in the policy's place in episode {', '.join(by_others)}")
        return "\n".join([*lines, *(f"again    {text}" for text in self.lost)])


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two policies on the same seeds."""

    first: Evaluation
    second: Evaluation
    difference: Interval
    """The mean of the second's returns less the first's, seed by seed, with its bootstrap interval."""

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
        difference = f"the second less the first, seed by seed: {self.difference}: {verdict}"
        return f"the first: {self.first}\nthe second: {self.second}\n{difference}"


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
    """Some slots, which step together: while one part's environments step, the policy acts for the other part.

    Only what an episode needs is stepped: a world is sent actions while one of its slots, at least, plays an episode.
    The lanes of a world step together. So a lane that has no episode left is stepped beside the others, with any
    action; what comes of that is neither counted nor recorded.
    """

    def __init__(self, envs: Any, number: int, work: _Work, recorder: Any) -> None:
        self.envs, self.work, self.recorder = envs, work, recorder
        self.slots = number + 2 * np.arange(envs.num_envs)
        """Their names for the policy, which are no other part's."""
        self.worlds = [report.slots for report in envs.remotes() if report.slots]
        """The rows that step together."""
        self.in_real_time = envs.unwrapped.fps is not None
        self.episodes: dict[int, EvaluatedEpisode] = {}
        """Those that are played, by row."""
        self.actions = envs.action_space.sample()
        self.observations: Any = None
        """The newest observation of each row."""
        self.active: list[int] = []
        """The rows that the policy was asked for."""
        self._begin(list(range(envs.num_envs)))
        self._ask()

    def _begin(self, rows: list[int]) -> None:
        """Reset slots, for episodes that wait with their seeds."""
        seeds: list[int | None] = [None] * len(self.slots)
        # The first reset is of all slots, which may be more than episodes that wait: the others get no seed.
        begun = rows[: len(self.work.queue)]
        for row in begun:
            self.episodes[row] = episode = self.work.queue.popleft()
            seeds[row] = episode.seed
        if isinstance(self.work.policy, RemotePolicy):
            self.work.policy.reset(self.slots[rows])
        mask = np.isin(np.arange(len(self.slots)), rows)
        self.observations, infos = self.envs.reset(seed=seeds, options={"reset_mask": mask})
        valid, errors = _told(infos, "valid"), _told(infos, "error")
        samples = self._samples(self.observations)
        for row in begun:
            # Else its server was lost meanwhile, and the observation is an old one.
            if not valid[row]:
                self.lose(row, _reason(errors.get(row)))
            elif self.recorder is not None:
                self.recorder.reset(row, samples[row], seeds[row])

    def _samples(self, observations: Any) -> list[Any]:
        """Return a batch as elements of the space of one environment; nothing where they are not recorded."""
        return [] if self.recorder is None else list(iterate(self.envs.observation_space, observations))

    def _ask(self) -> None:
        """Have the policy choose the next actions in its thread, while the other part's environments step."""
        self.active = sorted(self.episodes)
        if self.active:
            batch = take(self.observations, self.active)
            self.answer = self.work.thread.submit(self.work.call_policy, batch, self.slots[self.active])

    def step(self) -> None:
        """Step with the policy's answer, begin episodes that wait in slots that are free, and ask the policy again."""
        if self.active:
            self._act()
        elif self.work.queue and not self._free():
            self._receive(1)  # every server was lost: this waits for one that is back, at most as long as a step
        if self.work.queue and (free := self._free()):
            self._begin(free[: len(self.work.queue)])
        self._ask()

    def _free(self) -> list[int]:
        """Return the slots that are connected and have no episode."""
        states = self.envs.unwrapped.slot_states
        return [row for row in range(len(self.slots)) if row not in self.episodes and states[row] == SlotState.RUNNING]

    def _act(self) -> None:
        """Step the slots that play an episode, with the policy's answer."""
        given, replaced = np.asarray(self.answer.result()), self.actions[self.active]
        # int64 may stand for int32, and float64 for float32. A float for an integer is refused: it would lose its
        # fraction without a word.
        if given.shape != replaced.shape or not np.can_cast(given.dtype, replaced.dtype, "same_kind"):
            wanted = f"{replaced.dtype} actions of {replaced.shape}"
            raise InvalidActionError(f"expected the policy to return {wanted}, got {given.dtype} of {given.shape}")
        self.actions[self.active] = given
        rows = [row for world in self.worlds if not self.episodes.keys().isdisjoint(world) for row in world]
        self.envs.send(self.actions[rows], rows)
        waiting = set(rows)
        while waiting:
            waiting.difference_update(self._receive(len(waiting)))

    def _receive(self, at_least: int) -> list[int]:
        """Take what has come of at least so many slots, and return all slots of which something has."""
        found, observations, rewards, terminations, truncations, infos = self.envs.recv(at_least)
        rows: list[int] = found.tolist()
        self.observations = put(self.observations, rows, observations)
        errors, moved, acted, *successes = (_told(infos, name) for name in _INFOS)
        # Elsewhere an environment may have an info of this name.
        frames = _told(infos, "frames") if self.in_real_time else {}
        samples = self._samples(observations)
        by_others = {} if self.recorder is None else self.recorder.interventions(infos)
        for at, row in enumerate(rows):
            # Besides those that were stepped, these may be slots whose servers were lost, or are back.
            if row not in self.episodes:
                continue
            episode = self.episodes[row]
            # An environment may have infos of these names, too: only a text or a truncation comes from the client.
            if truncations[at] and (isinstance(errors.get(at), str) or moved.get(at)):
                self.lose(row, _reason(errors.get(at)))
                continue
            episode.total += float(rewards[at])
            passed = int(frames.get(at, 1))
            episode.length += passed
            episode.corrected += bool(acted.get(at))
            self.work.result.steps += passed
            self.work.result.missed += max(passed - 1, 0)  # in lock-step one passes
            if self.recorder is not None:
                by, action = by_others.get(at, ("agent", self.actions[row]))
                flags = {"terminated": bool(terminations[at]), "truncated": bool(truncations[at])}
                self.recorder.step(row, by, action, samples[at], rewards[at], **flags)
            if terminations[at] or truncations[at]:
                episode.success = next((bool(told[at]) for told in successes if at in told), None)
                self.work.result.episodes.append(self.episodes.pop(row))
                self.work.progress(len(self.work.result.episodes), self.work.total)
        return rows

    def lose(self, row: int, why: str) -> None:
        """Queue the episode of a slot to be begun again; raise RemoteError where that was done too often."""
        if self.recorder is not None:
            self.recorder.fail(row, "agent", self.actions[row], why, discards=True)
        self.work.lose(self.episodes.pop(row), why)


def _reason(error: Any) -> str:
    return str(error) if error else "its server was left"


class _Work:
    """The episodes to be played, and the policy; the arguments are those of `evaluate`."""

    def __init__(self, policy: Any, episodes: int, seed: int, progress: Callable[[int, int], None] | None) -> None:
        self.policy, self.total, self.progress = policy, episodes, progress or (lambda done, total: None)
        self.thread = ThreadPoolExecutor(1)
        """Calls the policy."""
        self.queue = deque(EvaluatedEpisode(number, seed + number) for number in range(episodes))
        self.result = Evaluation()
        self.error: RemoteError | None = None
        """Why no part can play on."""

    def call_policy(self, batch: Any, slots: Array) -> Any:
        """Return the policy's actions for a batch of observations, of these slots."""
        began = time.perf_counter()
        actions = self.policy(batch, slots=slots) if isinstance(self.policy, RemotePolicy) else self.policy(batch)
        self.result.seconds_in_policy += time.perf_counter() - began
        return actions

    def lose(self, episode: EvaluatedEpisode, why: str) -> None:
        """Let an episode be begun again before all others; raise RemoteError where that was done too often."""
        text = f"episode {episode.number} (seed {episode.seed}): {why}"
        if episode.attempts >= _ATTEMPTS:
            self.error = RemoteError("evaluation", f"{text}; it was begun {_ATTEMPTS} times. Look at the server's log")
            raise self.error
        self.result.lost.append(text)
        # With its own seed again: which seeds are played must not depend on which servers were lost.
        self.queue.appendleft(EvaluatedEpisode(episode.number, episode.seed, attempts=episode.attempts + 1))

    def results(self) -> str:
        """Say what the finished episodes gave; any thread may ask."""
        parts = [f"{len(self.result.episodes)} of {self.total} episodes"]
        parts += [f"mean {name} {values.mean():.4g}" for name, values in _measures(self.result.episodes.copy()).items()]
        return ", ".join([*parts, *([f"{len(self.result.lost)} begun again"] if self.result.lost else [])])

    def play(self, connected: Sequence[Any], recorders: Sequence[Any]) -> Evaluation:
        """Step in turns until every episode is done; where a part has no server left, the others go on."""
        result, before = self.result, getattr(self.policy, "seconds_in_function", 0.0)
        began = time.perf_counter()
        each = zip(connected, recorders, strict=True)
        parts = [_Part(envs, number, self, recorder) for number, (envs, recorder) in enumerate(each)]
        while len(result.episodes) < self.total:
            for part in tuple(parts):
                try:
                    part.step()
                except RemoteError as error:
                    # No other part is left that could play the rest, or an episode cannot be played at all.
                    if len(parts) == 1 or error is self.error:
                        raise
                    parts.remove(part)
                    for row in tuple(part.episodes):
                        part.lose(row, str(error))
        result.seconds = time.perf_counter() - began
        if isinstance(self.policy, RemotePolicy):
            in_function = self.policy.seconds_in_function - before
            result.seconds_in_policy_network = max(0.0, result.seconds_in_policy - in_function)
        result.episodes.sort(key=lambda episode: episode.number)
        return result


def _told(infos: dict[str, Any], name: str) -> dict[int, Any]:
    """Return an entry of the infos by slot, of those that have it."""
    values: Any = infos.get(name)
    if np.ndim(values) != 1:
        return {}
    return {row: values[row] for row in np.flatnonzero(infos.get(f"_{name}", np.ones(len(values)))).tolist()}


def evaluate(
    urls: str | Sequence[str] | Directory,
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
    the policy acts for the other half. The lanes of one world step together, and so are one half. A slot that has no
    episode left is not stepped; a lane is, beside the others of its world, and counts for nothing then. In real time
    all slots step together, each step waits for the next frame (`wait="next_frame"`), and lengths are in frames.

    Args:
        urls: As for `make_vec_remote`: a URL, a list of them, or a directory.
        policy: A `RemotePolicy`, or a function of a batch of observations, as for `serve_policy`; either is called in a
            thread of its own.
        episodes: How many.
        seed: The first episode's.
        num_envs: How many slots; None: what the URLs give.
        record: A folder to record the episodes in, with their observations: exactly those that count.
        progress: Called with the number of finished episodes, and of all.
        web_port: Meanwhile show the worlds side by side, and the results so far, at `http://127.0.0.1:PORT`. The
            servers tell the page of their worlds where they are started with `web=True`.
        keywords: Others of `make_vec_remote`.

    Raises:
        SettingError: The environments cannot be reset alone, or have spaces that are no arrays; or the policy is no
            function.
        InvalidActionError: The policy returns other actions than the environments take.
        RemoteError: No server is left, or an episode was lost five times.
    """
    check_counts(episodes=episodes)
    check_policy(policy)
    with contextlib.ExitStack() as opened:
        work = _Work(policy, episodes, seed, progress)
        opened.enter_context(work.thread)
        if web_port is not None:
            with feature("web", "web_port="):
                from bridge.web.gateway import serve_gateway  # it needs an extra, which evaluations do not

            credentials = ClientCredentials.of(**given_access(keywords))
            shown = [each.url for each in urls.endpoints()] if isinstance(urls, Directory) else urls
            opened.enter_context(serve_gateway(shown, port=web_port, upstream=credentials, note=work.results))
        connected = _connect(opened, urls, num_envs, keywords)
        recorders: list[Any] = [None] * len(connected)
        if record is not None:
            with feature("recording", "record="):
                from bridge.recording.record import Recording
                from bridge.recording.slot_recorder import SlotRecorder  # it needs an extra, which evaluations do not

            made = (SlotRecorder(envs, Recording(record, observations=True)) for envs in connected)
            recorders = [opened.enter_context(contextlib.closing(recorder)) for recorder in made]
        return work.play(connected, recorders)


def _connect(opened: contextlib.ExitStack, urls: Any, num_envs: int | None, keywords: dict[str, Any]) -> list[Any]:
    """Return the environments in parts that step in turns; `opened` closes them.

    In real time they are one part, whose steps wait for the next frame each. Without the wait the policy would be asked
    as often as the network allows, and would use a chunk of actions up within a frame or two. Of two parts each would
    wait for the other's frame, and so decide in every second one.
    """
    parts = _divided(opened, urls, num_envs, keywords)
    # Servers say whether they are in real time once they are joined, and those in lock-step refuse the setting.
    infos = [remote.info for envs in parts for remote in slots_of(envs).remotes()]
    if keywords.get("wait") is not None or not all(info is not None and info.fps for info in infos):
        return parts
    for envs in parts:
        envs.close()  # a robot has one seat
    return [_made(opened, urls, num_envs, {**keywords, "wait": "next_frame"})]


def _divided(opened: contextlib.ExitStack, urls: Any, num_envs: int | None, keywords: dict[str, Any]) -> list[Any]:
    """Return the environments in two parts, or in one where they cannot be divided."""
    of_each = not isinstance(urls, (str, Directory)) and len(urls) > 1 and num_envs in (None, len(urls))
    count = num_envs or 1
    # A list of URLs with a slot each is divided, and not its slots: each server is in one half.
    halves = [(urls[0::2], None), (urls[1::2], None)] if of_each else [(urls, count - count // 2), (urls, count // 2)]
    with contextlib.suppress(SettingError):  # where worlds have too many lanes for half of the slots
        if of_each or count > 1:
            return [_made(opened, some, slots, keywords) for some, slots in halves]
    return [_made(opened, urls, num_envs, keywords)]


def _made(opened: contextlib.ExitStack, urls: Any, num_envs: int | None, keywords: dict[str, Any]) -> Any:
    """Connect to the environments of a part."""
    envs: Any = provided("make_vec_remote")(
        urls, num_envs=num_envs, blocking=True, on_lost="continue", max_failures=None, **keywords
    )
    opened.callback(envs.close)
    if envs.metadata["autoreset_mode"] is not AutoresetMode.NEXT_STEP:
        raise SettingError(f"expected lanes that can be reset alone, with a seed each; those of {urls!r} cannot")
    acting, seeing = envs.single_action_space, envs.single_observation_space
    if not (isinstance(acting, _ARRAYS) and isinstance(seeing, (*_ARRAYS, spaces.Dict))):
        raise SettingError(f"expected arrays as actions, arrays or dicts as observations, got {acting} and {seeing}")
    return envs


def compare(
    urls: str | Sequence[str] | Directory, first: Callable[..., Any], second: Callable[..., Any], **keywords: Any
) -> Comparison:
    """Evaluate two policies on the same seeds, one after the other.

    Args:
        urls: As for `evaluate`.
        first: A policy.
        second: Another one.
        keywords: As for `evaluate`.
    """
    one, other = (evaluate(urls, policy, **keywords) for policy in (first, second))
    return Comparison(one, other, _interval(other.returns - one.returns))
