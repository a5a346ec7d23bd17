"""The clock of an environment with several agents, without I/O, threads or a time source.

The environment is reset and stepped for all agents at once. Each agent has its own lane in the episode, with its
action, its rewards and its end. An episode goes on as long as an agent is alive in it, whoever has joined. Agents
without an action use the default action.

Players can end the running episode early:

- A player that sends Reset leaves the running episode and waits for the next one.
- Once no player is in the running episode, and a player waits for the next one, the running episode is cut off.
- A player that was not in the running episode yet enters it, even in the middle. Its seed is for the next episode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bridge.core.worlds.environment import Job, Transition
from bridge.core.worlds.group import DEFAULT
from bridge.core.worlds.realtime.frame_loop import FrameLoop
from bridge.core.worlds.realtime.loop_lane import LaneBuffer, LaneEvent, LoopAgent, LoopLane, Phase

__all__ = ["JointLoop"]


class JointLoop(FrameLoop):
    """Decides when frames of one environment are due, and which actions they use.

    `lanes` has one item, the environment: its episode, its resets and its failures. `agent_lanes` has each agent's own
    lane. The job of a step has the actions of all living agents by name; `DEFAULT` means that there is none.

    Args:
        names: The agents.
        fps: Frames a second.
        may_repeat: Called with an agent's name, its newest observation and its last action; returns True if the action
            may be repeated.
        options: The options of `FrameLoop`.

    Raises:
        SettingError: A number is out of its range.
    """

    def __init__(
        self,
        names: Sequence[str],
        fps: float,
        *,
        may_repeat: Callable[[str, object, object], bool] = lambda name, observation, action: True,
        **options: Any,
    ) -> None:
        super().__init__(1, fps, DEFAULT, **options)
        # An agent's lane never asks for a reset, so it is never IDLE: it waits for the environment's reset.
        self.agent_lanes: dict[str, LoopLane] = {name: LoopLane(Phase.RESETTING) for name in names}
        self.environment = self.lanes[0]
        """The environment's episode."""
        self.alive: list[str] = []
        """The agents that act in the next frame, in the environment's order."""
        self._may_repeat = may_repeat

    def _choose(self, lane: LoopLane, now: float) -> dict[str, object]:
        chosen, lane.driven = {}, False
        for name in self.alive:
            agent_lane = self.agent_lanes[name]
            fresh = agent_lane.unused
            # `_newest_action` clears `unused`, so we read it before.
            action = self._newest_action(agent_lane, now)
            # The last move of a turn-based game is often illegal in the next turn, and PettingZoo's classic games end
            # the episode for an illegal move. A fresh action is passed on, because its agent has just chosen it.
            if action is not DEFAULT and not fresh and not self._may_repeat(name, agent_lane.observation, action):
                self.default_frames += 1
                agent_lane.applied_by, agent_lane.driven = "", False
                action = DEFAULT
            chosen[name] = action
        return chosen

    # Results of jobs

    def joint_began(self, job: Job, now: float, first: Mapping[str, Transition]) -> bool:
        """Handle the return of a reset; return False if it is stale.

        `first` has the first observation of each living agent, in the environment's order. Report an episode that is
        over at once, or has no agents, to `failed` instead.
        """
        # The environment's lane has no observation, reward or info: the agents' lanes have them.
        if not self.began(job, now, Transition(None)):
            return False
        if not self._autoreset:  # the clock stood
            self._start, self._index = now, 1
        self.alive = list(first)
        self._enter(first, now)
        return True

    def _enter(self, seen: Mapping[str, Transition], now: float) -> None:
        """Begin the lanes of agents that enter this episode."""
        for name in self.alive:
            agent_lane = self.agent_lanes[name]
            # An agent may appear during an episode. An agent that has ended does not come back in the same episode,
            # even if the environment lists it as alive again.
            if agent_lane.phase is not Phase.RUNNING and agent_lane.episode != self.environment.episode:
                agent_lane.episode = self.environment.episode
                agent_lane.begin(now, seen[name])

    def joint_stepped(
        self, job: Job, now: float, spent: float, seen: Mapping[str, Transition], alive: Sequence[str]
    ) -> dict[str, Transition] | None:
        """Handle the return of a frame.

        Args:
            job: The job of the frame.
            now: The time.
            spent: Seconds that it took.
            seen: The transition of each agent that acted or is alive now.
            alive: The agents that are still alive, in the environment's order.

        Returns:
            The transition of each agent that was in the episode; None: the result is stale.
        """
        self.step_times.add(spent)
        lane = self._current(job)
        if lane is None:
            return None
        lane.length += self.step_frames
        lane.frames += self.step_frames
        told: dict[str, Transition] = {}
        for name, agent_lane in self.agent_lanes.items():
            if agent_lane.phase is not Phase.RUNNING:
                continue
            got = told[name] = seen[name]
            agent_lane.add(now, got, self.step_frames)
            if got.ended:
                self.drop_action(agent_lane)
        self.alive = list(alive)
        # Only now: for an agent that appears, this frame is its first observation, without a reward.
        self._enter(seen, now)
        # The environment's episode ends with its last agent.
        if any(agent_lane.phase is Phase.RUNNING for agent_lane in self.agent_lanes.values()):
            lane.move(LaneEvent.STEPPED)
        else:
            lane.move(LaneEvent.ENDED)
            self._renew(lane)
        return told

    def _cut_off(self, lane: LoopLane, error: str | None = None, finished: bool = False) -> None:
        for agent_lane in self.agent_lanes.values():
            # A failed reset is reported to all agents; a failed frame only to agents in the episode.
            if agent_lane.phase is Phase.RUNNING or (error is not None and not finished):
                if agent_lane.phase is Phase.RUNNING:
                    agent_lane.move(LaneEvent.ENDED)
                self.drop_action(agent_lane)
                agent_lane.end(lane.episode, error=error, finished=finished)

    def _may_rest(self) -> bool:
        """True if the environment's last job was a reset, or used the default action of every agent."""
        driven = any(agent_lane.driven for agent_lane in self.agent_lanes.values() if agent_lane.phase is Phase.RUNNING)
        return not driven and super()._may_rest()

    def end(self) -> None:
        """End the running episode for all agents."""
        lane = self.environment
        if lane.phase is Phase.RUNNING:
            # Do not use `ask_reset`, which would begin the next episode even with `autoreset=False`.
            self._cut_off(lane)
            lane.move(LaneEvent.ENDED)
            self._renew(lane)

    # Agents

    def join_as(self, name: str, player: bool, *, follows: bool = False) -> LoopAgent:
        """Add a client that plays an agent, or sees what the agent sees; for `follows` see `LoopAgent`."""
        return self._admit(LoopAgent([self.agent_lanes[name]], player, follows=follows))

    def player_of(self, name: str) -> LoopAgent | None:
        """Return the player of an agent; None: nobody plays it."""
        agent_lane = self.agent_lanes[name]
        return next((one for one in self.loop_agents if one.player and one.buffers[0].lane is agent_lane), None)

    def may_enter(self, loop_agent: LoopAgent, buffer: LaneBuffer) -> bool:
        """True if the agent is alive in the running episode, and this player has not left the episode."""
        agent_lane = buffer.lane
        return agent_lane.phase is Phase.RUNNING and (not loop_agent.player or buffer.entered != agent_lane.episode)

    def _holds(self, loop_agent: LoopAgent) -> bool:
        """True if a player keeps the running episode going: it is in the episode, or is about to enter it."""
        (buffer,) = loop_agent.buffers
        agent_lane = buffer.lane
        if not loop_agent.player or agent_lane.phase is not Phase.RUNNING:
            return False
        # When all agents send Reset, the first Reset begins an episode. The later Resets would begin another one unless
        # the first agent counted before it enters.
        enters = loop_agent.asked and self.may_enter(loop_agent, buffer)
        # An agent that follows does not read its buffer, so `reading` is not set.
        return loop_agent.follows or buffer.reading == agent_lane.episode or enters

    def _waits(self, loop_agent: LoopAgent) -> bool:
        """True if a player has left the running episode."""
        (buffer,) = loop_agent.buffers
        entered = buffer.lane.episode if loop_agent.follows else buffer.entered
        return loop_agent.player and entered == self.environment.episode and not self._holds(loop_agent)

    def ask(self, loop_agent: LoopAgent, seed: int | None, options: object, restart: bool) -> None:
        """Handle an agent's Reset: it leaves its episode.

        Args:
            loop_agent: The agent.
            seed: The seed of the next episode; None: no seed.
            options: The options of the next episode; None: no options.
            restart: True if the agent wants a new episode, not the running one.
        """
        seeded = seed is not None or bool(options)
        # Do not reset a robot twice; see `ClockPacer.ask_reset`.
        restart = restart and (seeded or not loop_agent.buffers[0].follows_anew)
        self.give_up(loop_agent, restart)
        if not loop_agent.player:
            return
        lane = self.environment
        if seeded:
            lane.seed, lane.options = seed, options
        if lane.phase is Phase.RUNNING:
            # The episode goes on until its last player has sent Reset too.
            over = restart and not any(self._holds(other) for other in self.loop_agents if other is not loop_agent)
        else:
            # A running reset has another seed, so it must be repeated. One that `poll` has not returned yet will use
            # the new seed.
            over = lane.phase is Phase.FAILED or (seeded and not lane.asked)
        if over:
            self.ask_reset(0, lane.seed, lane.options)

    def give_up(self, loop_agent: LoopAgent, restart: bool = True) -> None:
        """Remove an agent from its episode; without `restart` it may enter the same episode again."""
        (buffer,) = loop_agent.buffers
        agent_lane = buffer.lane
        buffer.abandon()
        if loop_agent.player:
            self.drop_action(agent_lane)
            loop_agent.asked = True
            if not restart and agent_lane.phase is Phase.RUNNING:
                # Otherwise `may_enter` would refuse an episode that the player was in before.
                buffer.entered = 0

    def is_in_episode(self, loop_agent: LoopAgent) -> bool:
        """True if an agent is in the running episode."""
        (buffer,) = loop_agent.buffers
        return buffer.lane.phase is Phase.RUNNING and buffer.reading == buffer.lane.episode

    def sit_out(self, loop_agent: LoopAgent) -> None:
        """Exclude a player from the running episode; it may enter the next one."""
        loop_agent.buffers[0].entered = self.environment.episode

    def end_deserted(self) -> bool:
        """Cut off the running episode if all its players have left it and one waits for the next; return True if so."""
        lane = self.environment
        # With `autoreset=False` only `ask_reset` and `end` begin and end episodes.
        if not self._autoreset or lane.phase is not Phase.RUNNING or any(map(self._holds, self.loop_agents)):
            return False
        # Nobody waits for the next episode, so this one goes on with default actions.
        if not any(map(self._waits, self.loop_agents)):
            return False
        self.ask_reset(0, lane.seed, lane.options)
        return True
