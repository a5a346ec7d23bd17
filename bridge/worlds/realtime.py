"""The real-time world: a clock of the server steps the environments, whether agents call Step or not (U-1).

`RealtimeLoop` decides what happens when; this file gives it a thread, the environments, and agents' Steps. Frames are
run in the world's own thread, and each reset in one of its own, so that a slow reset holds up only what shares a lock
with it.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

from bridge import values
from bridge.clock import Clock, MonotonicClock
from bridge.errors import Code, RequestError, SettingError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.properties import ENCODED, TEXT, Property, PropertyTree
from bridge.space_json import published_space
from bridge.spaces import Layout
from bridge.tensors import Array, Spec, unpack_tensor
from bridge.wire import NO_SEED, TIMING
from bridge.worlds.base import Agent, AllOf, Lock, environment_failure, read_bytes, refuse_unknown
from bridge.worlds.gym import EnvAgent, EnvWorld
from bridge.worlds.isolated_env import IsolatedVectorEnv
from bridge.worlds.lane_infos import join_infos
from bridge.worlds.realtime_loop import Job, Mail, Phase, RealtimeLoop
from bridge.worlds.realtime_mail import Ended, Taken

__all__ = ["Realtime", "RealtimeAgent", "RealtimeWorld", "neutral_action"]

ROLES = ("player", "spectator")
WAITS = ("now", "next_frame")
_FRAME_DEADLINE = 10.0
_MOST_CHANNELS = 64


@dataclasses.dataclass(frozen=True)
class Realtime:
    """How a real-time world runs."""

    fps: float
    """Frames a second."""
    default_action: Any = None
    """Applied where there is no action of the player; None: the neutral one, zeros where the space has them."""
    max_action_age: float | None = None
    """Seconds that an action goes on at most before the default one takes its place; None: until the next one."""
    catch_up: float = 0.25
    """Seconds of frames that are made up for when the server is late; later ones are dropped."""
    reset_timeout: float = 60.0
    """Seconds that a first Step waits for an episode to begin."""
    thread_safe: bool = False
    """True: the author says that environments may be called at the same time, each from one thread; they then
    share no lock, and a slow reset holds up nobody."""
    clock: Clock | None = None
    """None: the machine's monotonic clock. One that has `subscribe` drives the world itself."""

    def channels(self, lanes: int) -> int:
        """Return how many calls at a time the process of an isolated world of so many lanes takes."""
        return min(lanes, _MOST_CHANNELS) if self.thread_safe else 1

    def check(self) -> None:
        """Raise SettingError where a number is out of its range."""
        RealtimeLoop(1, self.fps, None, max_action_age=self.max_action_age, catch_up=self.catch_up)


class RealtimeAgent(EnvAgent):
    """A seat in a real-time world: the player's, or a spectator's."""

    may_wait = True

    def __init__(
        self,
        world: RealtimeWorld,
        env: Any,
        observation_space: Any,
        action_space: Any,
        lanes: int | None,
        mail: Mail,
        wait: str,
    ) -> None:
        super().__init__(world, env, observation_space, action_space, lanes)
        self._real = world
        self._mail = mail
        self._wait = wait
        shape = () if lanes is None else (lanes,)
        self._first_extra = len(self.observations) + 1
        extras = [
            Spec.number("frames", shape, np.int64, np.asarray(0)),
            Spec.number("episodes", (-1,), np.uint8),
            Spec.number("timing", (*shape, len(TIMING)), np.float64),
        ]
        if lanes is not None:
            extras.append(Spec.number("resetting", shape, np.bool_))
        self.observations = {**self.observations, **dict(enumerate(extras, start=self._first_extra))}
        self._partial = False
        self._acts_only = False
        self._gone = False
        self._placeholder: Any = None
        self._frames = np.zeros(shape, np.int64)
        self._timing = np.zeros((*shape, len(TIMING)))
        self._resetting = np.zeros(shape, np.bool_)
        self._episodes: list[tuple[int, Ended]] = []
        self._space = observation_space

    @property
    def spectator(self) -> bool:
        """Whether its actions and resets change nothing."""
        return not self._mail.player

    def hang_up(self) -> None:
        """Let a Step that waits fail, because its client is gone."""
        self._gone = True
        with self._real.mailroom:
            self._real.mailroom.notify_all()

    def _has_gone(self) -> bool:
        return self._gone

    def prepare(self, uids: Sequence[int]) -> None:
        """An agent that asks which lanes are resetting is answered while some are; others when all are ready.

        One that asks for `timing` alone leaves its action, and its mail for a later Step.
        """
        self._partial = self._first_extra + 3 in uids
        self._acts_only = list(uids) == [self._first_extra + 2]

    def _read_seed(self, array: Array) -> Any:
        if self._lanes is None:
            return super()._read_seed(array)
        if array.shape not in ((), (self._lanes,)) or array.dtype.kind not in "iu":
            raise TensorError(f"expected an integer seed, or one for each of {self._lanes} lanes, got {array!r:.80}")
        if (array < (0 if array.shape == () else NO_SEED)).any():
            raise TensorError(f"expected non-negative seeds, or {NO_SEED} for none, got {array!r:.80}")
        if array.shape == ():
            return [int(array) + lane for lane in range(self._lanes)]
        return [None if seed == NO_SEED else int(seed) for seed in array.tolist()]

    SETTINGS = ("seed", "options", "restart", "reset_mask")

    def reset(self, settings: Mapping[str, pb.Tensor], running: bool) -> None:
        """Have the lanes begin anew, and return at once (U-2, U-9). A spectator's Reset changes only its own seat."""
        self._real.ask_reset(self._mail, *self.read_reset(settings))

    def read_reset(self, settings: Mapping[str, pb.Tensor]) -> tuple[Array, list[int | None], Any, bool]:
        """Return which lanes Reset settings name, a seed for each, the options, and whether what runs is cut off."""
        count = self._lanes or 1
        refuse_unknown(settings, self.SETTINGS if self._lanes else self.SETTINGS[:3], "Reset")
        try:
            seed = self._read_seed(unpack_tensor(settings["seed"], "seed")) if "seed" in settings else None
            options = read_bytes(settings, "options")
            if not isinstance(options, (dict, type(None))):
                raise TensorError(f"expected options to be a dict, got {type(options).__name__}")
            restart = bool(unpack_tensor(settings["restart"], "restart")) if "restart" in settings else True
            mask = np.ones(count, np.bool_)
            if "reset_mask" in settings:
                mask = unpack_tensor(settings["reset_mask"], "reset_mask")
                if mask.shape != (count,) or mask.dtype != np.bool_ or not mask.any():
                    raise TensorError(f"expected a reset_mask of {count} bools, one of them True, got {mask!r:.80}")
        except TensorError as error:
            raise RequestError(Code.INVALID_ARGUMENT, f"bad Reset settings: {error}") from error
        return mask, seed if isinstance(seed, list) else [seed] * count, options, restart

    def begin(self) -> int:
        """Wait until an episode runs, and enter it."""
        received = self._real.now()
        self._real.start()
        with self._real.mailroom:
            self._wait_for_lanes()
            self._collect(self._take_first(), received)
        return pb.RUNNING

    def _take_first(self) -> list[Taken | None]:
        """Enter the running episodes; lanes that did not change stay where they are, their mail untouched."""
        loop = self._real.loop
        taken: list[Taken | None] = []
        for index, (lane, box) in enumerate(zip(loop.lanes, self._mail.boxes, strict=True)):
            if not box.reading:
                taken.append(loop.take(self._mail, index))
            elif box.closing is not None:
                ended, at = box.closing
                taken.append(Taken(ended.observation, ended.info, 0.0, 0, False, False, at, ended.episode))
            else:
                at = lane.observed_at
                taken.append(Taken(lane.observation, lane.info, 0.0, 0, False, False, at, box.reading))
        return taken

    def _wait_for_lanes(self) -> None:
        """Return once the agent's lanes have something to tell: all of them, or one where it takes the rest later."""
        loop, boxes = self._real.loop, self._mail.boxes

        def ready() -> bool:
            there = [
                bool(box.reading) or lane.phase is Phase.RUNNING for lane, box in zip(loop.lanes, boxes, strict=True)
            ]
            if self._lanes is None and boxes[0].error is not None and not there[0]:
                error, boxes[0].error = boxes[0].error, None
                raise RequestError(Code.INTERNAL, error)
            return any(there) if self._partial else all(there)

        def reason() -> str:
            errors = "; ".join(box.error for box in boxes if box.error)
            return f"no episode began within reset_timeout={self._real.options.reset_timeout:g} s; {errors}"

        self._real.wait_until(ready, self._has_gone, self._real.options.reset_timeout, reason)

    def step(self, actions: Mapping[int, Array]) -> int:
        """Leave the action for the next frames, and tell what happened since the last Step; wait for nothing."""
        received = self._real.now()
        action = self._action(actions) if actions else None  # none: the last one goes on
        loop = self._real.loop
        with self._real.mailroom:
            self._real.refuse_if_over()
            if self._mail.player and actions:
                split = [action] if self._lanes is None else self._split(action)
                for index, own in enumerate(split):
                    if self._mail.boxes[index].reading:
                        loop.act(self._mail, index, own, received)
            if self._acts_only:
                self._timing[..., :2] = received, self._real.now()
                return pb.RUNNING
            if self._wait == "next_frame":
                self._wait_for_frame()
            if self._lanes is not None and not self._partial:
                self._wait_for_lanes()
            box = self._mail.boxes[0]
            if self._lanes is None and box.closing is not None and box.closing[0].error is not None:
                error = box.closing[0].error
                box.abandon()
                raise RequestError(Code.INTERNAL, error)
            self._collect([loop.take(self._mail, index) for index in range(len(loop.lanes))], received)
        if self._lanes is not None:
            return pb.RUNNING
        return pb.TERMINATED if self._terminated else pb.INTERRUPTED if self._truncated else pb.RUNNING

    def interrupt(self) -> None:
        """Tell the last of the episodes that a ResetWorld cuts off."""
        with self._real.mailroom:
            self._real.carry_out_reset()
            now = self._real.now()
            boxes = self._mail.boxes
            self._collect(
                [self._real.loop.take(self._mail, i) if box.reading else None for i, box in enumerate(boxes)], now
            )
            self._truncated[...] = True
            for box in boxes:
                box.abandon()
        self._real.start()

    def _wait_for_frame(self) -> None:
        """Return once each lane that the agent is in has had a frame, or its episode ended."""
        loop, boxes = self._real.loop, self._mail.boxes
        before = [lane.frames for lane in loop.lanes]

        def passed() -> bool:
            return all(
                not box.reading or box.closing is not None or lane.frames > had
                for lane, box, had in zip(loop.lanes, boxes, before, strict=True)
            )

        self._real.wait_until(
            passed, self._has_gone, _FRAME_DEADLINE, lambda: f"no frame passed within {_FRAME_DEADLINE:g} s"
        )

    def _split(self, action: Any) -> list[Any]:
        batch = self._env.action_space
        return list(gymnasium.vector.utils.iterate(batch, action))

    def _collect(self, taken: list[Taken | None], received: float) -> None:
        """Turn what was taken from the mail into what `observe` gives."""
        loop, boxes, now = self._real.loop, self._mail.boxes, self._real.now()
        self._episodes = [(index, ended) for index, box in enumerate(boxes) for ended in box.take_records()]
        infos: dict[int, Any] = {}
        for index, (item, box) in enumerate(zip(taken, boxes, strict=True)):
            at = () if self._lanes is None else (index,)
            self._resetting[at] = item is None
            self._reward[at] = item.reward if item else 0.0  # U-5
            self._terminated[at] = item is not None and item.terminated
            self._truncated[at] = item is not None and item.truncated
            self._frames[at] = item.frames if item else 0
            lane = loop.lanes[index]
            self._timing[at] = (
                received,
                now,
                item.observed_at if item else np.nan,
                loop.step_times.last,
                lane.action_delay,
                item.episode if item else lane.episode,
                loop.frames,
                loop.actions_applied,
                loop.actions_replaced,
                loop.actions_dropped,
                loop.overruns,
                loop.dropped,
                box.frames_skipped,
            )
            infos[index] = item.info if item else {}
            error = item.error if item else box.error
            if error is not None and self._lanes is not None:
                infos[index] = {**infos[index], "error": error}
                box.error = None
        if self._lanes is None:
            first = taken[0]
            if first is None:
                raise RequestError(Code.INTERNAL, "a single environment was read while it had no episode")
            self._observation, self._info = first.observation, first.info
            return
        self._observation = self._batch(
            [item.observation if item else self._missing(i) for i, item in enumerate(taken)]
        )
        self._info = join_infos({index: info for index, info in infos.items() if info}, self._lanes)

    def _missing(self, index: int) -> Any:
        """What stands in the place of a resetting lane's observation: any element; nobody is to look at it."""
        last = self._real.loop.lanes[index].observation
        if last is not None:
            return last
        if self._placeholder is None:
            space = published_space(self._env.envs[index].observation_space)
            self._placeholder = neutral_action(space)
        return self._placeholder

    def _batch(self, items: list[Any]) -> Any:
        space = self._space
        empty: Any = create_empty_array(space, len(items), fn=np.zeros)
        return concatenate(space, items, empty)

    def observe(self, uids: Sequence[int]) -> Mapping[int, Array]:
        """Return observations of the last transition."""
        first = self._first_extra
        found = dict(super().observe([uid for uid in uids if uid < first]))
        for uid in uids:
            if uid == first:
                found[uid] = self._frames
            elif uid == first + 1:
                found[uid] = np.frombuffer(self._encoded_episodes(), np.uint8)
            elif uid == first + 2:
                found[uid] = self._timing
            elif uid == first + 3:
                found[uid] = self._resetting
        return found

    def _encoded_episodes(self) -> bytes:
        if not self._episodes:
            return b""
        records = []
        for lane, ended in self._episodes:
            record: dict[str, Any] = {
                "lane": lane,
                "episode": ended.episode,
                "return": ended.reward,
                "length": ended.length,
                "terminated": ended.terminated,
                "truncated": ended.truncated,
            }
            if ended.error is not None:
                record["error"] = ended.error
            if ended.observation is not None:
                arrays = self._finals.pack(ended.observation, rounding=True)
                record["final_obs"] = [np.asarray(array) for array in arrays]
                record["final_info"] = values.decode(values.encode_info(ended.info, self._warned))
            records.append(record)
        return values.encode(records)

    @property
    def _finals(self) -> Any:
        return self._real.single_layout

    def properties(self) -> PropertyTree:
        """Return the tree below `world`, with this agent's role."""
        role = "spectator" if self.spectator else "player"
        return self._world.properties().merged(
            PropertyTree(
                [
                    Property("world.role", TEXT, "player or spectator", lambda: role),
                    Property("world.wait", TEXT, "what a Step waits for: now or next_frame", lambda: self._wait),
                ]
            )
        )


class RealtimeWorld(EnvWorld):
    """The world of one environment, or of the lanes of a SyncVectorEnv, that a clock drives.

    One agent plays, any number of others look on. The world goes on as long as it exists, also without agents; its
    clock starts with the first Step of the first of them.

    Args:
        name: The world's name.
        env: The environment, or the vector of them, whose `step` and `reset` are not used; owned by the world.
        lock: Held around every call of the environments, unless `options.thread_safe`.
        options: How it runs.

    Raises:
        SettingError: Another kind of vector environment, or options that do not fit.
    """

    def __init__(self, name: str, env: Any, lock: Lock, options: Realtime) -> None:
        super().__init__(name, env, lock)
        self._envs: list[Any] = [env]
        if self._lanes is not None:
            self._envs = list(env.envs) if isinstance(env, (SyncVectorEnv, IsolatedVectorEnv)) else []
        if not self._envs:
            kind = env.kind if isinstance(env, IsolatedVectorEnv) else type(env).__name__
            raise SettingError(
                "a real-time world of lanes steps each environment by itself: expected vectorization_mode='sync', "
                f"got {kind}"
            )
        space = published_space(self._envs[0].action_space)
        default = neutral_action(space) if options.default_action is None else options.default_action
        if not space.contains(default):
            raise SettingError(f"expected default_action to be an element of {space}, got {default!r:.80}")
        self.options = options
        self.loop = RealtimeLoop(
            len(self._envs),
            options.fps,
            default,
            max_action_age=options.max_action_age,
            catch_up=options.catch_up,
        )
        self._locks: list[Lock] = [threading.RLock() if options.thread_safe else lock for _ in self._envs]
        if options.thread_safe:
            self._lock = AllOf(self._locks)
        self._clock: Clock = MonotonicClock() if options.clock is None else options.clock
        self._subscribe: Callable[[Callable[[float], None]], Callable[[], None]] | None = getattr(
            options.clock, "subscribe", None
        )
        self._unsubscribe: Callable[[], None] | None = None
        self.mailroom = threading.Condition()
        """Held around everything that touches the loop; notified when something happened."""
        self._thread: threading.Thread | None = None
        self._ordered: tuple[Array, list[int | None], Any] | None = None
        self._left_open: set[int] = set() if self.isolated else set(range(len(self._envs)))
        self._wound_up = False
        self.single_layout = Layout(published_space(self._envs[0].observation_space), "observation")

    def now(self) -> float:
        """Return the world's time, seconds."""
        return self._clock.now()

    # Agents

    @property
    def agents(self) -> int:
        """How many agents are in, spectators too."""
        with self.mailroom:
            return len(self.loop.mails)

    def join(self, settings: Mapping[str, pb.Tensor]) -> Agent:
        """Seat an agent: settings `role` (player, spectator) and `wait` (now, next_frame)."""
        refuse_unknown(settings, ("role", "wait"), "JoinWorld")
        role = _one_of(settings, "role", ROLES)
        wait = _one_of(settings, "wait", WAITS)
        with self.mailroom:
            self.refuse_if_over()
            if role == "player" and any(mail.player for mail in self.loop.mails):
                raise RequestError(
                    Code.RESOURCE_EXHAUSTED,
                    f"the world {self.name!r} has its one player already; join it with the setting role=spectator, "
                    "or create a world of your own",
                )
            mail = self.loop.join(role == "player")
        return self._seat_for(mail, wait)

    def _seat_for(self, mail: Mail, wait: str) -> RealtimeAgent:
        env, single = self._env, self._lanes is None
        spaces_ = (
            (published_space(env.observation_space), published_space(env.action_space))
            if single
            else (published_space(env.single_observation_space), published_space(env.single_action_space))
        )
        return RealtimeAgent(self, env, *spaces_, self._lanes, mail, wait)

    def prepare_reset(self, settings: Mapping[str, pb.Tensor], caller: Agent | None) -> Callable[[], None]:
        """Take the settings of a ResetWorld; the first agent that is told carries it out."""
        mask, seeds, options, _ = self._seat_for(Mail(len(self._envs), False), WAITS[0]).read_reset(settings)
        with self.mailroom:
            self.refuse_if_over()
            self._ordered = mask, seeds, options
        return self._withdraw

    def _withdraw(self) -> None:
        with self.mailroom:
            self._ordered = None

    def reset(
        self, settings: Mapping[str, pb.Tensor], caller: Agent | None, gone: Callable[[], bool], timeout: float
    ) -> None:
        """Begin a new episode in every lane, once every other agent was told that its own is over (D-15)."""
        super().reset(settings, caller, gone, timeout)
        self.carry_out_reset()
        if isinstance(caller, RealtimeAgent):
            with self.mailroom:
                for box in caller._mail.boxes:
                    box.abandon()
        self.start()

    def carry_out_reset(self) -> None:
        """Cut off what runs, as a ResetWorld ordered; again: nothing."""
        with self.mailroom:
            if self._ordered is None:
                return
            (mask, seeds, options), self._ordered = self._ordered, None
            for index in np.flatnonzero(mask).tolist():
                self.loop.ask_reset(index, seeds[index], options, self.now())
            self.mailroom.notify_all()

    def vacate(self, agent: EnvAgent) -> None:
        """Free the seat of an agent that leaves; the world goes on (D-16)."""
        if isinstance(agent, RealtimeAgent):
            with self.mailroom:
                self.loop.leave(agent._mail)

    def ask_reset(
        self, mail: Mail, mask: Array, seeds: Sequence[int | None], options: Any, restart: bool = True
    ) -> None:
        """Give up an agent's episodes, and where it is the player have the lanes begin new ones.

        Without `restart`, lanes that run stay as they are, and the agent enters the episodes that run there.
        """
        with self.mailroom:
            self.refuse_if_over()
            for index, chosen in enumerate(mask.tolist()):
                if not chosen:
                    continue
                mail.boxes[index].abandon()
                lane = self.loop.lanes[index]
                plain = seeds[index] is None and not options
                under_way = lane.phase in (Phase.RESETTING, Phase.IDLE) or not restart
                if not mail.player or (plain and under_way):
                    continue
                self.loop.ask_reset(index, seeds[index], options, self.now())
            if mail.player:
                self.loop.start(self.now())
            self.mailroom.notify_all()
        self.start()

    def wait_until(
        self, ready: Callable[[], bool], gone: Callable[[], bool], seconds: float, reason: Callable[[], str]
    ) -> None:
        """Wait in the mailroom; raise DEADLINE_EXCEEDED after so many seconds of the machine's clock."""
        deadline = time.monotonic() + seconds
        while True:
            self.refuse_if_over()
            if gone():
                raise RequestError(Code.CANCELLED, "the client hung up while it waited")
            if ready():
                return
            rest = deadline - time.monotonic()
            if rest <= 0:
                raise RequestError(Code.DEADLINE_EXCEEDED, reason())
            self.mailroom.wait(rest)

    # The clock

    def start(self) -> None:
        """Let the clock run, and with a clock that is turned by hand do at once what waits."""
        with self.mailroom:
            if self._closed:
                return
            self.loop.start(self.now())
            if self._subscribe is not None and self._unsubscribe is None:
                self._unsubscribe = self._subscribe(self.run_until)
            elif self._subscribe is None and self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"bridge-realtime {self.name}", daemon=True)
                self._thread.start()
        if self._unsubscribe is not None:
            self.run_until(self.now())

    def _run(self) -> None:
        while True:
            with self.mailroom:
                while not self._closed:
                    due = self.loop.next_due()
                    rest = (due if due is not None else self.now()) - self.now()
                    if rest <= 0 or any(lane.asked and not lane.busy for lane in self.loop.lanes):
                        break
                    self.mailroom.wait(rest)
                if self._closed:
                    return
                jobs = self.loop.poll(self.now())
            for job in jobs:
                if job.kind == "reset":
                    thread = threading.Thread(target=self._do, args=(job,), name="bridge-reset", daemon=True)
                    thread.start()
                else:
                    self._do(job)

    def run_until(self, when: float) -> None:
        """Run every frame that is due by then, one after the other, each at its own time: for virtual clocks."""
        at: float | None = None
        while True:
            with self.mailroom:
                if self._closed:
                    return
                due = self.loop.next_due()
                again = at is not None  # a frame that ended an episode: the next one begins at that same time
                if at is None:
                    at = when if due is None else min(due, when)
                jobs = self.loop.poll(at)
            for job in jobs:
                self._do(job, at)
            if not jobs:
                if again:
                    at = None
                elif due is None or due > when:
                    return

    def _do(self, job: Job, at: float | None = None) -> None:
        """Run a job and tell the loop; `at` is the time that it takes place, None: now."""
        env, error, outcome, spent = self._envs[job.lane], None, None, 0.0
        with self._locks[job.lane]:
            if not self._closed:
                began = time.perf_counter()
                try:
                    outcome = (
                        env.reset(seed=job.seed, options=job.options) if job.kind == "reset" else env.step(job.action)
                    )
                    outcome = _kept(outcome)
                    if job.kind == "step":
                        outcome = (
                            outcome[0],
                            float(outcome[1]),
                            bool(outcome[2]),
                            bool(outcome[3]),
                            outcome[4],
                        )
                except RequestError as problem:  # what its process tells
                    error = problem.message
                except (Exception, SystemExit) as problem:
                    error = environment_failure(job.kind, problem).message
                spent = time.perf_counter() - began
        with self.mailroom:
            now = self.now() if at is None else at
            self._times[job.kind].add(spent)
            self._closed = self._closed or (error is not None and not self.alive)  # its clock stops with its process
            if self._closed:
                self.loop.lanes[job.lane].busy = False
            elif error is not None:
                self.loop.failed(job, now, error)
            elif outcome is not None and job.kind == "reset":
                self.loop.began(job, now, *outcome)
            elif outcome is not None:
                self.loop.stepped(job, now, spent, *outcome)
            closed = self._closed
            self.mailroom.notify_all()
        if closed:
            self._close_idle()

    # The end

    def retire(self) -> bool:
        """End the world if no agent is in, so that none joins meanwhile."""
        with self.mailroom:
            if self.loop.mails:
                return False
            self._closed = True
        self.close()
        return True

    def close(self) -> None:
        """Stop the clock and close the environments; one that is in a call is closed when the call returns."""
        with self.mailroom:
            if self._wound_up:
                return
            self._wound_up = self._closed = True
            self.mailroom.notify_all()
        try:
            if self.isolated:
                self._env.close()  # a call that does not return is ended by it
        finally:
            if self._unsubscribe is not None:
                self._unsubscribe()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join(5.0)
            self._close_idle()

    def _close_idle(self) -> None:
        """Close the environments that no thread is in."""
        with self.mailroom:
            ready = [index for index in self._left_open if not self.loop.lanes[index].busy]
            self._left_open.difference_update(ready)
            last = not self._left_open
        for index in ready:
            with self._locks[index]:
                try:
                    self._envs[index].close()
                except (Exception, SystemExit) as error:
                    raise environment_failure("close", error) from error
        if last and self._lanes is not None:
            self._env.closed = True  # its environments are

    def properties(self) -> PropertyTree:
        """Return the tree below `world`, with the clock's."""

        def statistics() -> Any:
            with self.mailroom:
                return self.loop.statistics()

        return (
            super()
            .properties()
            .merged(
                PropertyTree(
                    [
                        Property("world.fps", ENCODED, "frames a second", lambda: self.options.fps),
                        Property("world.realtime", ENCODED, "the clock's counts and percentiles", statistics),
                    ]
                )
            )
        )


def _kept(value: Any) -> Any:
    """A copy that the environment cannot change when it steps on."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: _kept(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_kept(item) for item in value)
    return value


def _one_of(settings: Mapping[str, pb.Tensor], name: str, choices: Sequence[str]) -> str:
    """A setting that is one of a few words; the first is the default."""
    if name not in settings:
        return choices[0]
    try:
        value = unpack_tensor(settings[name], name)[()]
    except TensorError as error:
        raise RequestError(Code.INVALID_ARGUMENT, f"bad JoinWorld settings: {error}") from error
    if value not in choices:
        raise RequestError(
            Code.INVALID_ARGUMENT, f"expected the setting {name} to be one of {', '.join(choices)}, got {value!r:.80}"
        )
    return str(value)


def neutral_action(space: spaces.Space[Any]) -> Any:
    """Return the element of a space that is nearest to doing nothing: zeros, the first choice, the shortest text."""
    if isinstance(space, spaces.Box):
        return np.clip(np.zeros(space.shape), space.low, space.high).astype(space.dtype)
    if isinstance(space, spaces.Discrete):
        return space.dtype.type(space.start)
    if isinstance(space, spaces.MultiDiscrete):
        return np.array(space.start, dtype=space.dtype)
    if isinstance(space, spaces.MultiBinary):
        return np.zeros(space.shape, dtype=space.dtype)
    if isinstance(space, spaces.Dict):
        return {key: neutral_action(part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(neutral_action(part) for part in space.spaces)
    if isinstance(space, spaces.Text):
        return space.character_list[0] * space.min_length if space.min_length else ""
    if isinstance(space, spaces.OneOf):
        return np.int64(0), neutral_action(space.spaces[0])
    same = copy.deepcopy(space)
    same.seed(0)
    return same.sample()
