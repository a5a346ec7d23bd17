"""Evaluate a policy on served environments: a fixed number of seeded episodes on any number of slots."""

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
"""How often an episode may be begun before the evaluation gives up."""
_ARRAYS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_INFOS = ("error", "moved", "intervention", "is_success", "success")


class Interval(NamedTuple):
    """A mean, and the limits of its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.4g} (95 %: {self.low:.4g} to {self.high:.4g})"


@dataclasses.dataclass
class EvaluatedEpisode:
    """One episode of an evaluation."""

    number: int
    """The number of the episode, from 0."""
    seed: int
    """The seed of its reset: the evaluation's seed plus the number."""
    total: float = 0.0
    """The sum of the rewards."""
    length: int = 0
    """The number of steps; in real time, the frames of the world."""
    success: bool | None = None
    """`is_success` or `success` of the last info; None: the info has neither."""
    corrected: int = 0
    """Steps in which a person in the browser acted instead of the policy."""
    attempts: int = 1
    """How often the episode was begun: more than once if its server was lost."""


@dataclasses.dataclass
class Evaluation:
    """The results of a policy's episodes, in the order of their numbers."""

    episodes: list[EvaluatedEpisode] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    """The duration of the evaluation."""
    seconds_in_policy: float = 0.0
    """The time spent in calls of the policy, including the network."""
    seconds_in_policy_network: float = 0.0
    """The part of `seconds_in_policy` that was not spent in a served policy's function."""
    steps: int = 0
    """All steps, in real time all frames, including those of lost episodes."""
    missed: int = 0
    """Real time only: frames that passed before the policy had chosen an action for them."""
    lost: list[str] = dataclasses.field(default_factory=list)
    """For each episode that was begun again: its number, its seed, and the reason."""

    @property
    def returns(self) -> Array:
        """The return of each episode: float64 `(episodes,)`."""
        return _measures(self.episodes)["return"]

    def intervals(self) -> dict[str, Interval]:
        """Return the mean return, mean length and, if infos contain it, success rate, with bootstrap intervals."""
        return {name: _interval(values) for name, values in _measures(self.episodes).items()}

    def summary(self) -> dict[str, Any]:
        """Return all results as values for JSON."""
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
        if self.missed:  # a robot continued with an old action: a faster policy would do better
            lines.append(f"missed   {self.missed} of {self.steps} frames, in which the last action went on: act faster")
        by_others = [
            f"{episode.number} ({counted(episode.corrected, 'step')})" for episode in self.episodes if episode.corrected
        ]
        if by_others:  # the means then measure the policy and the person together
            lines.append(f"others   acted in the policy's place in episode {', '.join(by_others)}")
        return "\n".join([*lines, *(f"again    {text}" for text in self.lost)])


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two policies on the same seeds."""

    first: Evaluation
    second: Evaluation
    difference: Interval
    """The mean of the second policy's returns minus the first's, paired by seed, with its bootstrap interval."""

    @property
    def beyond_chance(self) -> bool:
        """True if the interval of the difference does not contain zero."""
        return self.difference.low > 0 or self.difference.high < 0

    def summary(self) -> dict[str, Any]:
        """Return all results as values for JSON."""
        both = {"first": self.first.summary(), "second": self.second.summary()}
        return {"difference": self.difference._asdict(), "beyond_chance": self.beyond_chance, **both}

    def __str__(self) -> str:
        verdict = "larger than chance" if self.beyond_chance else "not larger than chance"
        difference = f"the second less the first, seed by seed: {self.difference}: {verdict}"
        return f"the first: {self.first}\nthe second: {self.second}\n{difference}"


def _measures(episodes: Sequence[EvaluatedEpisode]) -> dict[str, Array]:
    """Return the measured values of each episode, float64; without success if no info contained it."""
    found = {
        "return": [episode.total for episode in episodes],
        "length": [episode.length for episode in episodes],
        "success": [episode.success for episode in episodes if episode.success is not None],
    }
    return {name: np.array(values, np.float64) for name, values in found.items() if values}


def _interval(values: Array) -> Interval:
    """Return a mean and its interval by the percentile bootstrap, with a fixed seed."""
    generator = np.random.default_rng(0)
    means = [generator.choice(values, len(values)).mean() for _ in range(_RESAMPLES)]
    low, high = np.percentile(means, (2.5, 97.5))
    return Interval(float(values.mean()), float(low), float(high))


class _Part:
    """Slots that step together: while one part's environments step, the policy acts for the other part.

    A world gets actions only while at least one of its slots plays an episode. The lanes of a world step together, so a
    lane without an episode is stepped with any action; its results are neither counted nor recorded.
    """

    def __init__(self, envs: Any, number: int, work: _Work, recorder: Any) -> None:
        self.envs, self.work, self.recorder = envs, work, recorder
        self.slots = number + 2 * np.arange(envs.num_envs)
        """The numbers of the slots for the policy, distinct between parts."""
        self.worlds = [report.slots for report in envs.remotes() if report.slots]
        """The rows that step together, for each world."""
        self.in_real_time = envs.unwrapped.fps is not None
        self.episodes: dict[int, EvaluatedEpisode] = {}
        """The episodes in progress, by row."""
        self.actions = envs.action_space.sample()
        self.observations: Any = None
        """The newest observation of each row."""
        self.active: list[int] = []
        """The rows for which the policy was asked."""
        self._begin(list(range(envs.num_envs)))
        self._ask()

    def _begin(self, rows: list[int]) -> None:
        """Reset slots with the seeds of waiting episodes."""
        seeds: list[int | None] = [None] * len(self.slots)
        # The first reset is of all slots, even if fewer episodes wait: the remaining slots get no seed.
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
            # Otherwise its server was lost in the meantime, and the observation is an old one.
            if not valid[row]:
                self.lose(row, _reason(errors.get(row)))
            elif self.recorder is not None:
                self.recorder.reset(row, samples[row], seeds[row])

    def _samples(self, observations: Any) -> list[Any]:
        """Return a batch as elements of the space of one environment; empty if episodes are not recorded."""
        return [] if self.recorder is None else list(iterate(self.envs.observation_space, observations))

    def _ask(self) -> None:
        """Ask the policy for the next actions, in its thread, while the other part's environments step."""
        self.active = sorted(self.episodes)
        if self.active:
            batch = take(self.observations, self.active)
            self.answer = self.work.thread.submit(self.work.call_policy, batch, self.slots[self.active])

    def step(self) -> None:
        """Step with the policy's actions, begin waiting episodes in free slots, and ask the policy again."""
        if self.active:
            self._act()
        elif self.work.queue and not self._free():
            self._receive(1)  # every server was lost: wait for one to return, at most as long as a step
        if self.work.queue and (free := self._free()):
            self._begin(free[: len(self.work.queue)])
        self._ask()

    def _free(self) -> list[int]:
        """Return the slots that are connected and play no episode."""
        states = self.envs.unwrapped.slot_states
        return [row for row in range(len(self.slots)) if row not in self.episodes and states[row] == SlotState.RUNNING]

    def _act(self) -> None:
        """Step the slots that play an episode, with the policy's actions."""
        given, replaced = np.asarray(self.answer.result()), self.actions[self.active]
        # int64 is accepted for int32, and float64 for float32. A float for an integer is refused: its fraction would be
        # lost silently.
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
        """Receive results of at least this many slots, and return all slots that have some."""
        found, observations, rewards, terminations, truncations, infos = self.envs.recv(at_least)
        rows: list[int] = found.tolist()
        self.observations = put(self.observations, rows, observations)
        errors, moved, acted, *successes = (_told(infos, name) for name in _INFOS)
        # In lock-step an environment may have an info of this name.
        frames = _told(infos, "frames") if self.in_real_time else {}
        samples = self._samples(observations)
        by_others = {} if self.recorder is None else self.recorder.interventions(infos)
        for at, row in enumerate(rows):
            # Besides the stepped slots, these may be slots whose servers were lost or have returned.
            if row not in self.episodes:
                continue
            episode = self.episodes[row]
            # An environment may have infos of these names, too. The client's own value is a text, or comes with a
            # truncation.
            if truncations[at] and (isinstance(errors.get(at), str) or moved.get(at)):
                self.lose(row, _reason(errors.get(at)))
                continue
            episode.total += float(rewards[at])
            passed = int(frames.get(at, 1))
            episode.length += passed
            episode.corrected += bool(acted.get(at))
            self.work.result.steps += passed
            self.work.result.missed += max(passed - 1, 0)  # in lock-step it is 1
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
        """Queue a slot's episode to be begun again; raise RemoteError if it was begun too often."""
        if self.recorder is not None:
            self.recorder.fail(row, "agent", self.actions[row], why, discards=True)
        self.work.lose(self.episodes.pop(row), why)


def _reason(error: Any) -> str:
    return str(error) if error else "its server was left"


class _Work:
    """The episodes to play, and the policy. For the arguments see `evaluate`."""

    def __init__(self, policy: Any, episodes: int, seed: int, progress: Callable[[int, int], None] | None) -> None:
        self.policy, self.total, self.progress = policy, episodes, progress or (lambda done, total: None)
        self.thread = ThreadPoolExecutor(1)
        """The thread that calls the policy."""
        self.queue = deque(EvaluatedEpisode(number, seed + number) for number in range(episodes))
        self.result = Evaluation()
        self.error: RemoteError | None = None
        """Why no part can continue."""

    def call_policy(self, batch: Any, slots: Array) -> Any:
        """Return the policy's actions for a batch of observations of these slots."""
        began = time.perf_counter()
        actions = self.policy(batch, slots=slots) if isinstance(self.policy, RemotePolicy) else self.policy(batch)
        self.result.seconds_in_policy += time.perf_counter() - began
        return actions

    def lose(self, episode: EvaluatedEpisode, why: str) -> None:
        """Queue an episode to be begun again before all others; raise RemoteError if it was begun too often."""
        text = f"episode {episode.number} (seed {episode.seed}): {why}"
        if episode.attempts >= _ATTEMPTS:
            self.error = RemoteError("evaluation", f"{text}; it was begun {_ATTEMPTS} times. Look at the server's log")
            raise self.error
        self.result.lost.append(text)
        # With the same seed: the seeds that are played must not depend on lost servers.
        self.queue.appendleft(EvaluatedEpisode(episode.number, episode.seed, attempts=episode.attempts + 1))

    def results(self) -> str:
        """Return a text with the results of the finished episodes. Safe to call from any thread."""
        parts = [f"{len(self.result.episodes)} of {self.total} episodes"]
        parts += [f"mean {name} {values.mean():.4g}" for name, values in _measures(self.result.episodes.copy()).items()]
        return ", ".join([*parts, *([f"{len(self.result.lost)} begun again"] if self.result.lost else [])])

    def play(self, connected: Sequence[Any], recorders: Sequence[Any]) -> Evaluation:
        """Step the parts in turn until every episode is finished. If a part has no server left, the others continue."""
        result, before = self.result, getattr(self.policy, "seconds_in_function", 0.0)
        began = time.perf_counter()
        each = zip(connected, recorders, strict=True)
        parts = [_Part(envs, number, self, recorder) for number, (envs, recorder) in enumerate(each)]
        while len(result.episodes) < self.total:
            for part in tuple(parts):
                try:
                    part.step()
                except RemoteError as error:
                    # No other part is left that could play the remaining episodes, or an episode cannot be played at
                    # all.
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
    """Return an entry of the infos by slot, for the slots that have it."""
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
    """Play a fixed number of episodes on served environments, and return statistics of the policy's results.

    Episode k is seeded `seed + k`, whichever slot plays it, so results do not depend on the number of slots. Every
    episode counts, however long it takes. An episode whose server is lost is begun again on any slot. Half of the slots
    step while the policy acts for the other half; the lanes of one world step together, so they are in the same half. A
    slot without an episode is not stepped, except a lane, which steps with its world and is not counted. In real time
    all slots step together, each step waits for the next frame (`wait="next_frame"`), and lengths are in frames.

    Args:
        urls: As for `make_vec_remote`: a URL, a list of them, or a directory.
        policy: A `RemotePolicy`, or a function of a batch of observations, as for `serve_policy`. It is called in a
            thread of its own.
        episodes: The number of episodes.
        seed: The seed of the first episode.
        num_envs: The number of slots; None: as many as the URLs provide.
        record: A folder for recordings of the counted episodes, with their observations.
        progress: Called with the number of finished episodes and the number of all episodes.
        web_port: If given, `http://127.0.0.1:PORT` shows the worlds side by side, and the results so far. It shows the
            worlds of servers that were started with `web=True`.
        keywords: Other keywords of `make_vec_remote`.

    Raises:
        SettingError: The environments cannot be reset one by one, or their spaces are not arrays, or the policy is not
            callable.
        InvalidActionError: The policy returned actions that are not in the environments' action space.
        RemoteError: No server is left, or an episode was lost five times.
    """
    check_counts(episodes=episodes)
    check_policy(policy)
    with contextlib.ExitStack() as opened:
        work = _Work(policy, episodes, seed, progress)
        opened.enter_context(work.thread)
        if web_port is not None:
            with feature("web", "web_port="):
                from bridge.web.gateway import serve_gateway  # only the page needs its extra

            credentials = ClientCredentials.of(**given_access(keywords))
            shown = [each.url for each in urls.endpoints()] if isinstance(urls, Directory) else urls
            opened.enter_context(serve_gateway(shown, port=web_port, upstream=credentials, note=work.results))
        connected = _connect(opened, urls, num_envs, keywords)
        recorders: list[Any] = [None] * len(connected)
        if record is not None:
            with feature("recording", "record="):
                from bridge.recording.record import Recording
                from bridge.recording.slot_recorder import SlotRecorder  # only recordings need its extra

            made = (SlotRecorder(envs, Recording(record, observations=True)) for envs in connected)
            recorders = [opened.enter_context(contextlib.closing(recorder)) for recorder in made]
        return work.play(connected, recorders)


def _connect(opened: contextlib.ExitStack, urls: Any, num_envs: int | None, keywords: dict[str, Any]) -> list[Any]:
    """Connect to the environments, and return them in parts that step in turn; `opened` closes them.

    In real time there is one part, and each of its steps waits for the next frame. Without the wait the policy would be
    asked as often as the network allows, and would use up a chunk of actions within a frame or two. With two parts,
    each would also wait for the other's frame, and so act only in every second one.
    """
    parts = _divided(opened, urls, num_envs, keywords)
    # Servers report whether they are in real time when they are joined. Lock-step servers refuse the setting `wait`.
    infos = [remote.info for envs in parts for remote in slots_of(envs).remotes()]
    if keywords.get("wait") is not None or not all(info is not None and info.fps for info in infos):
        return parts
    for envs in parts:
        envs.close()  # they may have a single place, as a robot does
    return [_made(opened, urls, num_envs, {**keywords, "wait": "next_frame"})]


def _divided(opened: contextlib.ExitStack, urls: Any, num_envs: int | None, keywords: dict[str, Any]) -> list[Any]:
    """Return the environments in two parts, or in one if they cannot be divided."""
    of_each = not isinstance(urls, (str, Directory)) and len(urls) > 1 and num_envs in (None, len(urls))
    count = num_envs or 1
    # A list of URLs with one slot each is divided by URL: each server is in one half.
    halves = [(urls[0::2], None), (urls[1::2], None)] if of_each else [(urls, count - count // 2), (urls, count // 2)]
    with contextlib.suppress(SettingError):  # worlds may have too many lanes for half of the slots
        if of_each or count > 1:
            return [_made(opened, some, slots, keywords) for some, slots in halves]
    return [_made(opened, urls, num_envs, keywords)]


def _made(opened: contextlib.ExitStack, urls: Any, num_envs: int | None, keywords: dict[str, Any]) -> Any:
    """Return the connected environments of one part."""
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
        first: The first policy.
        second: The second policy.
        keywords: As for `evaluate`.
    """
    one, other = (evaluate(urls, policy, **keywords) for policy in (first, second))
    return Comparison(one, other, _interval(other.returns - one.returns))
