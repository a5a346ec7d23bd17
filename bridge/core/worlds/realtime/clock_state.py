"""A clock's state of one agent, and the additional observations of the agent's Steps."""

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

__all__ = ["EPISODES", "RESETTING", "TIMES", "WAITS", "ClockState"]

# The indices of the additional observations, after `frames` at 0.
EPISODES = 1
TIMES = 2
RESETTING = 3
WAITS = ("now", "next_frame", "new_frame")
"""The events that a Step may wait for. The first one is the default.

`now`: do not wait. `next_frame`: wait until every lane has finished a frame that began after the Step's action arrived.
`new_frame`: wait at most 2 s for a frame, an end or a new episode of any lane that was not reported yet; clients with
Steps in flight use it.
"""


class ClockState:
    """A clock's state of one agent, and the additional observations of the agent's Steps.

    Args:
        loop_agent: The agent in the loop, with its buffers.
        wait: The event that its Steps wait for, one of `WAITS`.
        facts: The facts of the environment.
        spaces: The agent's spaces.
    """

    def __init__(self, loop_agent: LoopAgent, wait: str, facts: EnvFacts, spaces: Spaces) -> None:
        lanes, self._space = facts.num_envs, facts.observation_space
        # A record of an ended episode has the final observation of one lane; an observation covers all lanes.
        self._finals = Layout(spaces[0], "observation")
        self.loop_agent = loop_agent
        self.buffers = loop_agent.buffers
        """The agent's buffers, one for each lane."""
        self.wait = wait
        shape = () if lanes is None else (lanes,)
        self.specs = [
            Spec.number("frames", shape, np.int64, np.asarray(0)),
            Spec.number("episodes", (-1,), np.uint8),
            Spec.number("timing", (*shape, len(TIMING)), np.float64),
        ]
        """The specs of the additional observations."""
        if lanes is not None:
            self.specs.append(Spec.number("resetting", shape, np.bool_))
        self.frames = np.zeros(shape, np.int64)
        self.timing = np.zeros((*shape, len(TIMING)))
        self.resetting = np.zeros(shape, np.bool_)
        self.episodes: list[tuple[int, Ended]] = []
        """The ended episodes that the current Step reports, each with its lane."""
        self.partial = False
        """True if Steps are answered while some lanes reset; `resetting` reports those lanes."""
        self.ended = False
        """True if its episode has ended, by itself or by a ResetWorld, and no Reset has arrived since."""
        self.absent_from = 0
        """The episode without this agent that was reported to it last; 0: none."""

    def collect(
        self, agent: EnvAgent, taken: list[Told[Seen] | None], loop: FrameLoop, received: float, now: float
    ) -> None:
        """Turn the items taken from the buffers into the agent's observations.

        Args:
            agent: The agent.
            taken: An item for each lane; None: the agent is in no episode of the lane.
            loop: The clock's loop.
            received: When the Step arrived, in seconds of the clock.
            now: When the Step is answered.
        """
        lanes, buffers = agent.lanes, self.buffers
        self.episodes = [(index, ended) for index, buffer in enumerate(buffers) for ended in buffer.take_records()]
        infos: dict[int, Mapping[str, object]] = {}
        pairs = list(zip(taken, buffers, strict=True))
        for index, (item, buffer) in enumerate(pairs):
            at = () if lanes is None else (index,)
            lane = buffer.lane
            # U-5: a lane without an episode has no reward and no flags, and NaN as the time of its observation.
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
                # Report it once. An ended episode's error belongs to its end, and is not kept here.
                buffer.error = None
        if lanes is None:
            # None if a ResetWorld ends the sequence after a failure ended the episode. Keep the last observation.
            if taken[0] is not None:
                agent.observation = taken[0].observed.observation
            agent.info = infos[0]
            return
        space: Any = self._space
        # A tensor needs a row for each lane. A lane that resets has its last observation, or a placeholder.
        rows = [buffer.lane.observation if item is None else item.observed.observation for item, buffer in pairs]
        rows = [neutral_action(space) if item is None else item for item in rows]
        empty: Any = create_empty_array(space, len(rows), fn=np.zeros)
        with failures_in("step"):  # such as an observation outside of the space, or an info that is not a dict
            agent.observation = concatenate(space, rows, empty)
            agent.info = join_infos({index: info for index, info in infos.items() if info}, lanes)

    def observe(self, agent: EnvAgent, wanted: Sequence[int]) -> Mapping[int, Array]:
        """Return frames, ended episodes, timing, and which lanes reset."""
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
                # `encode` alone would raise for a value that the codec cannot encode.
                record["final_info"] = agent.infos.write_apart(ended.info)
            records.append(record)
        return values.encode(records)
