"""Agents of real-time worlds: their Steps hand in actions for the next frames and report the past ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from bridge.core.encoding import values
from bridge.core.encoding.names import TIMING
from bridge.core.encoding.properties import TEXT, Property, PropertyTree
from bridge.core.encoding.spaces import Layout
from bridge.core.encoding.tensors import Array, Spec
from bridge.core.worlds.base import failures_in
from bridge.core.worlds.default_actions import neutral_action
from bridge.core.worlds.environment import Spaces
from bridge.core.worlds.lane_infos import join_infos
from bridge.core.worlds.realtime.lane_buffer import Ended, Taken
from bridge.core.worlds.realtime.loop import LoopAgent, Phase
from bridge.core.worlds.settings import Settings, wrong
from bridge.core.worlds.single import EnvAgent
from bridge.errors import Code, RequestError
from bridge.pb import dm_env_rpc_pb2 as pb

if TYPE_CHECKING:
    from bridge.core.worlds.realtime.clocked_world import ClockedWorld

__all__ = ["WAITS", "RealtimeAgent"]

_FRAME_DEADLINE = 10.0
"""Seconds beyond a frame's own time that a Step waits for one."""
_MOST_HELD = 2.0
"""Seconds that a Step waits for news at most: clients take a server for lost that does not answer for longer."""
WAITS = ("now", "next_frame", "new_frame")
"""The events that a Step may wait for; the first is the default.

`now` is nothing. `next_frame` is one more finished frame of every lane. `new_frame` is a frame, an end or a new episode
of any lane that was not told yet, for at most 2 s; clients with Steps in flight use it.
"""


class RealtimeAgent(EnvAgent):
    """An agent of a real-time world: a player, or a spectator.

    Args:
        world: The world that it is in.
        loop_agent: Its part in the loop, with the buffers of what it is to be told.
        wait: What its Steps wait for: `now`, `next_frame` or `new_frame`.
        spaces: Of one agent of several; None: the world has one player.
    """

    def __init__(
        self, world: ClockedWorld[Any], loop_agent: LoopAgent, wait: str, spaces: Spaces | None = None
    ) -> None:
        super().__init__(world, spaces)
        lanes = self.lanes
        self.world = world
        """Where it is."""
        self._loop_agent = loop_agent
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
        self._ended = False
        self._frames = np.zeros(shape, np.int64)
        self._timing = np.zeros((*shape, len(TIMING)))
        self._resetting = np.zeros(shape, np.bool_)
        self._episodes: list[tuple[int, Ended]] = []
        self._space, action_space = spaces or self._facts.spaces
        # A record has the final observation of one lane, whereas observations are of all of them.
        self._finals = self._observation_layout if lanes is None else Layout(self._space, "observation")
        self._batched_actions = action_space if lanes is None else batch_space(action_space, lanes)

    def name_player(self, player: str) -> None:
        """Set who acts through it."""
        super().name_player(player)
        self._loop_agent.name = player

    @property
    def plays(self) -> bool:
        """True if it is a player."""
        return not self.spectator

    @property
    def spectator(self) -> bool:
        """True if its actions and resets change nothing."""
        return not self._loop_agent.player

    def hang_up(self) -> None:
        """End its wait."""
        self.world.cancel(self)

    def prepare(self, uids: Sequence[int]) -> None:
        """A Step that requests `resetting` is answered while lanes reset; others are answered when all lanes are ready.

        A Step that requests only `timing` hands in its action and leaves the buffers for a later Step.
        """
        self._partial = self._first_extra + 3 in uids
        self._acts_only = list(uids) == [self._first_extra + 2]

    def reset(self, settings: Settings, running: bool) -> None:
        """Reset the lanes, and return at once (U-2, U-9). A spectator's Reset does not affect the lanes."""
        self.world.ask_reset(self._loop_agent, self.world.read_reset(settings))
        self._ended = False

    async def begin(self) -> int:
        """Wait until an episode runs, and enter it; with `new_frame` after a Reset alone, not by Steps sent ahead."""
        received = self.world.now()
        # Steps that were in flight when the episode ended would enter the next one before the client has asked for it.
        if self._ended and self._wait == "new_frame" and self.lanes is None:  # lanes begin by themselves
            text = "the episode has ended; with wait=new_frame send Reset before the first Step of the next one"
            raise RequestError(Code.FAILED_PRECONDITION, text)
        self.world.start()
        await self.world.settled()
        await self._wait_for_lanes()
        self._collect(self._take(repeats=True), received)
        self._tell_names()
        return pb.RUNNING

    def _take(self, *, repeats: bool = False, enters: bool = True) -> list[Taken | None]:
        """Give out what the agent is to be told of each lane; unless it `enters`, of those alone that it is in."""
        loop, agent = self.world.loop, self._loop_agent
        lanes = enumerate(agent.buffers)
        return [loop.take(agent, i, repeats=repeats) if enters or buffer.reading else None for i, buffer in lanes]

    async def _wait_for_lanes(self) -> None:
        """Return once the agent's lanes have something to tell: all of them, or one where it takes the rest later."""
        loop, buffers = self.world.loop, self._loop_agent.buffers

        def ready() -> bool:
            there = [bool(buffer.reading) or loop.may_enter(self._loop_agent, buffer) for buffer in buffers]
            # A failed reset is the answer of a single environment's Step; of lanes, `_collect` puts it into the infos.
            if self.lanes is None and buffers[0].error is not None and not there[0]:
                error, buffers[0].error = buffers[0].error, None
                raise RequestError(Code.INTERNAL, error)
            self._refuse_absence()
            return any(there) if self._partial else all(there)

        def reason() -> str | None:
            if self.world.others_play:
                return None
            errors = "; ".join(buffer.error for buffer in buffers if buffer.error)
            return f"no episode began within reset_timeout={self.world.options.reset_timeout:g} s; {errors}"

        await self.world.wait_until(self, ready, self.world.options.reset_timeout, reason)

    def _refuse_absence(self) -> None:
        """Raise where the running episode began without this agent, and it was not told so."""

    def decode(self, actions: Mapping[int, Array]) -> object:
        """Return the environment's action; None: the last one goes on."""
        return super().decode(actions) if actions else None

    async def apply(self, action: object) -> int:
        """Leave the action for the next frames, and tell what happened since the last Step."""
        received = self.world.now()
        # Before any wait: the frame that this Step waits for is to use its action.
        self.act(action, received, [buffer.reading for buffer in self._loop_agent.buffers])
        # `Throttle` sends its action at once and asks for the observation at the frame's end: what passes between is
        # for that Step to tell.
        if self._acts_only:
            self._timing[..., :2] = received, self.world.now()
            return pb.RUNNING
        buffer = self._loop_agent.buffers[0]
        # The last Step was refused, as below: this one is the first of the next episode.
        if self.lanes is None and not buffer.reading:
            return await self.begin()
        if self._wait == "next_frame":
            await self._wait_for_frame()
        elif self._wait == "new_frame":
            await self._wait_for_news()
        # A client that does not ask for `resetting` cannot be told that a lane has no observation, so it waits for one.
        if self.lanes is not None and not self._partial:
            await self._wait_for_lanes()
        # The Step is refused, and a refused Step tells nothing else: the agent is out of the episode, so the next one
        # begins.
        if self.lanes is None and buffer.closing is not None and (error := buffer.closing.error) is not None:
            self._ended = True
            buffer.abandon()
            raise RequestError(Code.INTERNAL, error)
        self._collect(self._take(), received)
        if self.lanes is not None:
            return pb.RUNNING
        self._ended = bool(self._terminated or self._truncated)
        return pb.TERMINATED if self._terminated else pb.INTERRUPTED if self._truncated else pb.RUNNING

    def act(self, action: object, received: float, episodes: Sequence[int]) -> None:
        """Leave an action for the next frames.

        Args:
            action: The action; None: the last one goes on.
            received: When it came, seconds of the world's clock.
            episodes: Of each lane the number of the episode that it is for; 0: for none.

        Raises:
            RequestError: The world is over.
        """
        self.world.refuse_if_over()
        if action is None or not self._loop_agent.player:
            return
        for index, own in enumerate([action] if self.lanes is None else iterate(self._batched_actions, action)):
            if episodes[index]:  # else the lane is in no episode: its action is for nothing (U-5)
                self.world.loop.act(self._loop_agent, index, own, received, episodes[index])

    def interrupt(self) -> None:
        """Report the last observations of the episodes that a ResetWorld ends."""
        # By the first agent that is told; for the others this does nothing.
        self.world.carry_out_reset()
        # The Step that ends the sequence must not enter an episode that began meanwhile.
        self._collect(self._take(enters=False), self.world.now())
        self._truncated[...] = True
        self._ended = True
        # The episode may go on for others, or another one has begun: this agent is in neither.
        self.abandon()
        self.world.start()

    def abandon(self) -> None:
        """Give up the episodes that it is in."""
        for buffer in self._loop_agent.buffers:
            buffer.abandon()

    def rest(self) -> None:
        """Do nothing until the next Step: a default action stands in."""
        for buffer in self._loop_agent.buffers:
            self.world.loop.drop_action(buffer.lane)

    def leave(self) -> None:
        """Leave the world, which goes on (D-16)."""
        self.world.acting.leave(self)
        self.world.dismiss(self._loop_agent)

    async def _wait_for_frame(self) -> None:
        """Return once each lane that the agent is in has had a frame, or its episode ended."""
        before = [(buffer, buffer.lane.frames) for buffer in self._loop_agent.buffers]

        def passed() -> bool:
            # A lane that the agent is not in may be long in its reset, and an end is news enough.
            waiting = [pair for pair in before if pair[0].reading and pair[0].closing is None]
            return all(buffer.lane.frames > had for buffer, had in waiting)

        deadline = _FRAME_DEADLINE + 1.0 / self.world.options.fps
        await self.world.wait_until(self, passed, deadline, lambda: f"no frame passed within {deadline:g} s")

    async def _wait_for_news(self) -> None:
        """Return once a frame has passed that the agent was not told of, or an episode ended; at most after 2 s."""
        loop, loop_agent = self.world.loop, self._loop_agent

        def told() -> bool:
            buffers = loop_agent.buffers
            lanes = [buffer.lane for buffer in buffers]
            # Lanes are stepped one after the other: to answer for the first would take an answer, and a Step in flight,
            # for each lane. Where a whole frame waits already, it is told.
            if any(lane.busy and lane.phase is Phase.RUNNING for lane in lanes):  # the frame is not complete
                return any(buffer.unseen > 1 for buffer in buffers)
            return any(
                buffer.closing is not None
                or (buffer.unseen > 0 if buffer.reading else loop.may_enter(loop_agent, buffer))
                for buffer in buffers
            )

        try:
            await self.world.wait_until(self, told, _MOST_HELD, lambda: "nothing is new")
        except RequestError as error:
            # Nothing new is no error: the answer repeats the newest observation, with 0 frames.
            if error.code is not Code.DEADLINE_EXCEEDED:
                raise

    def _collect(self, taken: list[Taken | None], received: float) -> None:
        """Turn what was taken from the buffers into what `observe` gives."""
        loop, buffers, now = self.world.loop, self._loop_agent.buffers, self.world.now()
        self._episodes = [(index, ended) for index, buffer in enumerate(buffers) for ended in buffer.take_records()]
        infos: dict[int, Mapping[str, object]] = {}
        pairs = list(zip(taken, buffers, strict=True))
        for index, (item, buffer) in enumerate(pairs):
            at = () if self.lanes is None else (index,)
            lane = buffer.lane
            # U-5: a lane without an episode has no reward and no flags; NaN: no observation was made.
            told = item or Taken(None, {}, np.nan, lane.episode, error=buffer.error)
            self._resetting[at] = item is None
            self._reward[at], self._frames[at] = told.reward, told.frames  # U-5
            self._terminated[at], self._truncated[at] = told.terminated, told.truncated
            self._timing[at] = (
                received, now, told.observed_at, loop.step_times.last, lane.action_delay, told.episode, loop.frames,
                loop.actions_applied, loop.actions_replaced, loop.actions_dropped, loop.overruns, loop.dropped,
                buffer.frames_skipped,
            )  # fmt: skip
            infos[index] = told.info
            if told.error is not None and self.lanes is not None:
                infos[index] = {**told.info, "error": told.error}
                # Told once. An ended episode's error comes with the end, and is not kept here.
                buffer.error = None
        if self.lanes is None:
            # None: a ResetWorld ends the sequence after a failure has ended its episode. The last observation stays.
            if taken[0] is not None:
                self._observation = taken[0].observation
            self._info = infos[0]
            return
        # A tensor has a row for each lane, and no None: a lane that resets has its last observation, or a placeholder.
        seen = [buffer.lane.observation if item is None else item.observation for item, buffer in pairs]
        seen = [neutral_action(self._space) if item is None else item for item in seen]
        empty: Any = create_empty_array(self._space, len(seen), fn=np.zeros)
        with failures_in("step"):  # an observation that is not of the space, an info that is no dict
            self._observation = concatenate(self._space, seen, empty)
            self._info = join_infos({index: info for index, info in infos.items() if info}, self.lanes)

    def observe(self, uids: Sequence[int]) -> Mapping[int, Array]:
        """Return observations of the last transition."""
        first = self._first_extra
        extras = {first: self._frames, first + 2: self._timing, first + 3: self._resetting}
        # Before the info, which tells what final infos lack, too.
        if first + 1 in uids:
            extras[first + 1] = np.frombuffer(self._encoded_episodes(), np.uint8)
        found = super().observe([uid for uid in uids if uid < first])
        return {**found, **{uid: extras[uid] for uid in uids if uid >= first}}

    def _encoded_episodes(self) -> bytes:
        if not self._episodes:
            return b""
        records = []
        for lane, ended in self._episodes:
            record: dict[str, object] = {
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
                # `encode` would raise for a value that the codec does not carry: `encode_info` leaves it out, as in
                # other infos.
                encoded = values.encode_info(ended.info, self._notes)
                # Clients read no notes there: the next info takes them along.
                record["final_info"], self._notes.fresh, _ = values.decode_info(encoded)
            records.append(record)
        return values.encode(records)

    def properties(self) -> PropertyTree:
        """Return the tree below `world`, with this agent's role."""
        role = "spectator" if self.spectator else "player"
        waits = f"what a Step waits for: {', '.join(WAITS)}"
        seat = "the JoinWorld setting seat of a stream for its actions"
        own = [
            Property("world.role", TEXT, "player or spectator", lambda: role),
            Property("world.wait", TEXT, waits, lambda: self._wait, self._set_wait),
            Property("world.seat", TEXT, seat, lambda: self.world.acting.key_of(self)),
        ]
        return self.world.properties().merged(PropertyTree(own))

    def _set_wait(self, wait: object) -> None:
        if wait not in WAITS:
            raise wrong("world.wait", f"one of {', '.join(WAITS)}", wait)
        self._wait = str(wait)
