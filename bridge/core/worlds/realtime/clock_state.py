"""What a clock keeps of an agent: its place in the loop, and what its Step is told beside the usual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector.utils import concatenate, create_empty_array

from bridge.core.encoding import values
from bridge.core.encoding.frame_buffer import Told
from bridge.core.encoding.names import TIMING
from bridge.core.encoding.spaces import Layout
from bridge.core.encoding.tensors import Array, Spec
from bridge.core.worlds.agent import EnvAgent
from bridge.core.worlds.base import failures_in
from bridge.core.worlds.environment import EnvFacts, Spaces
from bridge.core.worlds.group import neutral_action
from bridge.core.worlds.lane_hosts import join_infos
from bridge.core.worlds.realtime.frame_loop import FrameLoop
from bridge.core.worlds.realtime.loop_lane import Ended, LoopAgent, Seen

__all__ = ["EPISODES", "RESETTING", "TIMES", "WAITS", "ClockPart"]

# The places of what agents are told beside the usual, after `frames`.
EPISODES = 1
TIMES = 2
RESETTING = 3
WAITS = ("now", "next_frame", "new_frame")
"""The events that a Step may wait for; the first is the default.

`now` is nothing. `next_frame` is one more finished frame of every lane, which began after the Step's action came.
`new_frame` is a frame, an end or a new episode of any lane that was not told yet, for at most 2 s; clients with Steps
in flight use it.
"""


class ClockPart:
    """What a clock keeps of an agent: its place in the loop, and what its Step is told beside the usual.

    Args:
        loop_agent: Its place in the loop, with the buffers of what it is to be told.
        wait: What its Steps wait for, one of `WAITS`.
        facts: Those of the environment.
        spaces: The agent's.
    """

    def __init__(self, loop_agent: LoopAgent, wait: str, facts: EnvFacts, spaces: Spaces) -> None:
        lanes, self._space = facts.num_envs, facts.observation_space
        # Records of ended episodes have the final observation of one lane, whereas observations are of all of them.
        self._finals = Layout(spaces[0], "observation")
        self.loop_agent = loop_agent
        self.buffers = loop_agent.buffers
        """Its news, a buffer for each lane."""
        self.wait = wait
        shape = () if lanes is None else (lanes,)
        self.specs = [
            Spec.number("frames", shape, np.int64, np.asarray(0)),
            Spec.number("episodes", (-1,), np.uint8),
            Spec.number("timing", (*shape, len(TIMING)), np.float64),
        ]
        """What its Step is told beside the usual."""
        if lanes is not None:
            self.specs.append(Spec.number("resetting", shape, np.bool_))
        self.frames = np.zeros(shape, np.int64)
        self.timing = np.zeros((*shape, len(TIMING)))
        self.resetting = np.zeros(shape, np.bool_)
        self.episodes: list[tuple[int, Ended]] = []
        """The ends of episodes that its Step tells, each with its lane."""
        self.partial = False
        """True if its Steps are answered while lanes reset, of which `resetting` tells."""
        self.ended = False
        """True if its episode has ended, or a ResetWorld ended it, and no Reset came since."""
        self.absent_from = 0
        """The episode that began without it, as it was told; 0: none."""

    def collect(
        self, agent: EnvAgent, taken: list[Told[Seen] | None], loop: FrameLoop, received: float, now: float
    ) -> None:
        """Turn what was taken from the buffers into what the agent's Step is told.

        Args:
            agent: The agent.
            taken: An item for each lane; None: the lane has no episode for it.
            loop: The clock's.
            received: When the Step came, seconds of the clock.
            now: When it is answered.
        """
        lanes, buffers = agent.lanes, self.buffers
        self.episodes = [(index, ended) for index, buffer in enumerate(buffers) for ended in buffer.take_records()]
        infos: dict[int, Mapping[str, object]] = {}
        pairs = list(zip(taken, buffers, strict=True))
        for index, (item, buffer) in enumerate(pairs):
            at = () if lanes is None else (index,)
            lane = buffer.lane
            # U-5: a lane without an episode has no reward and no flags; NaN: no observation was made.
            told = item or Told(Seen(lane.episode, 0, False, None, {}, np.nan))
            seen = told.observed
            self.resetting[at] = item is None
            agent.reward[at], self.frames[at] = told.reward, told.frames  # U-5
            agent.terminated[at], agent.truncated[at] = told.terminated, told.truncated
            self.timing[at] = (
                received, now, seen.observed_at, loop.step_times.last, lane.action_delay, seen.episode, loop.frames,
                loop.actions_applied, loop.actions_replaced, loop.actions_dropped, loop.overruns, loop.dropped,
                buffer.frames_skipped,
            )  # fmt: skip
            infos[index] = {**seen.info, **told.intervention} if told.intervention else seen.info
            error = buffer.error if item is None else seen.error if told.truncated else None
            if error is not None and lanes is not None:
                infos[index] = {**infos[index], "error": error}
                # Told once. An ended episode's error comes with the end, and is not kept here.
                buffer.error = None
        if lanes is None:
            # None: a ResetWorld ends the sequence after a failure has ended its episode. The last observation stays.
            if taken[0] is not None:
                agent.observation = taken[0].observed.observation
            agent.info = infos[0]
            return
        space: Any = self._space
        # A tensor has a row for each lane, and no None: a lane that resets has its last observation, or a placeholder.
        rows = [buffer.lane.observation if item is None else item.observed.observation for item, buffer in pairs]
        rows = [neutral_action(space) if item is None else item for item in rows]
        empty: Any = create_empty_array(space, len(rows), fn=np.zeros)
        with failures_in("step"):  # an observation that is not of the space, an info that is no dict
            agent.observation = concatenate(space, rows, empty)
            agent.info = join_infos({index: info for index, info in infos.items() if info}, lanes)

    def observe(self, agent: EnvAgent, wanted: Sequence[int]) -> Mapping[int, Array]:
        """Return frames, ended episodes, times, and which lanes reset."""
        found = {0: self.frames, TIMES: self.timing, RESETTING: self.resetting}
        if EPISODES in wanted:
            found[EPISODES] = np.frombuffer(self._encoded_episodes(agent), np.uint8)
        return found

    def _encoded_episodes(self, agent: EnvAgent) -> bytes:
        if not self.episodes:
            return b""
        records = []
        for lane, ended in self.episodes:
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
                # `encode` would raise for a value that the codec does not carry.
                record["final_info"] = agent.infos.write_apart(ended.info)
            records.append(record)
        return values.encode(records)
