"""The clock of an environment of several agents, without input, output, threads or time.

The environment is reset and stepped for all agents at once; each agent has a part of its own in the episode, with its
action, its rewards and its end. An episode goes on while an agent is alive in it, whoever has joined: where there is
no action of an agent, a default one stands in.

When a new episode begins before the environment ends the running one is a matter of the players:

- One that sends Reset leaves the running episode and waits for the next.
- Once no player is in the running episode any more, and one waits for the next, the running one is cut off.
- A player that was not in the running episode yet enters it, also in its midst; its seed is for the next one.
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
    """Says when frames of one environment are due, and which actions they are made of.

    `lanes` holds the environment alone: its episode, its resets and its failures. `parts` holds what each agent has of
    the episode. A step's job has the actions of all agents that are alive by name, `DEFAULT` where there is none.

    Args:
        names: The agents.
        fps: Frames a second.
        may_repeat: Tells of an agent's name, its newest observation and its last action whether the action may be
            applied once more.
        options: As for `FrameLoop`.

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
        # A part never asks for a reset, so it is never IDLE: it waits for the environment's.
        self.parts: dict[str, LoopLane] = {name: LoopLane(Phase.RESETTING) for name in names}
        self.environment = self.lanes[0]
        """The environment's episode."""
        self.alive: list[str] = []
        """The agents that act in the next frame, in the environment's order."""
        self._may_repeat = may_repeat

    def _choose(self, lane: LoopLane, now: float) -> dict[str, object]:
        chosen, lane.driven = {}, False
        for name in self.alive:
            part = self.parts[name]
            fresh = part.unused
            # This takes the mark of a fresh action away, which is read before.
            action = self._newest_action(part, now)
            # The last move of a turn-based game is often forbidden in the next turn, and PettingZoo's classic games end
            # the episode for an illegal one. A fresh action is passed on as it is, since its agent has just chosen it.
            if action is not DEFAULT and not fresh and not self._may_repeat(name, part.observation, action):
                self.default_frames += 1
                part.applied_by, part.driven = "", False
                action = DEFAULT
            chosen[name] = action
        return chosen

    # Results of jobs

    def joint_began(self, job: Job, now: float, first: Mapping[str, Transition]) -> bool:
        """A reset returned: what each agent sees that is alive, in the environment's order; return whether it counts.

        An episode that is over already, or without agents, is to be told as a failure.
        """
        # The environment's own lane has no observation, reward or info: agents have parts.
        if not self.began(job, now, Transition(None)):
            return False
        if not self._autoreset:  # the clock stood
            self._start, self._index = now, 1
        self.alive = list(first)
        self._enter(first, now)
        return True

    def _enter(self, seen: Mapping[str, Transition], now: float) -> None:
        """Begin the parts of agents that were not in this episode before."""
        for name in self.alive:
            part = self.parts[name]
            # An agent that the environment brings in during an episode begins here. One that has ended in it does not
            # come back, even if the environment names it as alive again.
            if part.phase is not Phase.RUNNING and part.episode != self.environment.episode:
                part.episode = self.environment.episode
                part.begin(now, seen[name])

    def joint_stepped(
        self, job: Job, now: float, spent: float, seen: Mapping[str, Transition], alive: Sequence[str]
    ) -> dict[str, Transition] | None:
        """A frame of the environment returned.

        Args:
            job: The frame's.
            now: The time.
            spent: Seconds that it took.
            seen: Of every agent that acted or is alive now.
            alive: The agents that go on, in the environment's order.

        Returns:
            What each agent is told that was in the episode; None: the episode was given up meanwhile.
        """
        self.step_times.add(spent)
        lane = self._current(job)
        if lane is None:
            return None
        lane.length += self.step_frames
        lane.frames += self.step_frames
        told: dict[str, Transition] = {}
        for name, part in self.parts.items():
            if part.phase is not Phase.RUNNING:
                continue
            got = told[name] = seen[name]
            part.add(now, got, self.step_frames)
            if got.ended:
                self.drop_action(part)
        self.alive = list(alive)
        # After the frame was added: to an agent that comes in, it is the first observation, and has no reward.
        self._enter(seen, now)
        # The environment's episode ends with that of its last agent.
        if any(part.phase is Phase.RUNNING for part in self.parts.values()):
            lane.move(LaneEvent.STEPPED)
        else:
            lane.move(LaneEvent.ENDED)
            self._renew(lane)
        return told

    def _cut_off(self, lane: LoopLane, error: str | None = None, finished: bool = False) -> None:
        for part in self.parts.values():
            # Of a reset that failed all agents are told; of a frame, those who were in the episode.
            if part.phase is Phase.RUNNING or (error is not None and not finished):
                if part.phase is Phase.RUNNING:
                    part.move(LaneEvent.ENDED)
                self.drop_action(part)
                part.end(lane.episode, error=error, finished=finished)

    def _may_rest(self) -> bool:
        """True if the last that the environment did is the default action of each agent that acts, or a reset."""
        driven = any(part.driven for part in self.parts.values() if part.phase is Phase.RUNNING)
        return not driven and super()._may_rest()

    def end(self) -> None:
        """Cut off the running episode, as if the environment had ended it for all agents."""
        lane = self.environment
        if lane.phase is Phase.RUNNING:
            # Not by `ask_reset`, which begins another episode also with `autoreset=False`.
            self._cut_off(lane)
            lane.move(LaneEvent.ENDED)
            self._renew(lane)

    # Agents

    def join_as(self, name: str, player: bool, *, follows: bool = False) -> LoopAgent:
        """Add a client that plays an agent, or looks over its shoulder; `follows`: as for `LoopAgent`."""
        return self._admit(LoopAgent([self.parts[name]], player, follows=follows))

    def player_of(self, name: str) -> LoopAgent | None:
        """Return who plays an agent; None: nobody."""
        part = self.parts[name]
        return next((one for one in self.loop_agents if one.player and one.buffers[0].lane is part), None)

    def may_enter(self, loop_agent: LoopAgent, buffer: LaneBuffer) -> bool:
        """True if an episode runs that the agent has a part in, and which this player has not left."""
        part = buffer.lane
        return part.phase is Phase.RUNNING and (not loop_agent.player or buffer.entered != part.episode)

    def _holds(self, loop_agent: LoopAgent) -> bool:
        """True if the running episode goes on for a player: it is in it, or asked for it and is about to enter."""
        (buffer,) = loop_agent.buffers
        part = buffer.lane
        if not loop_agent.player or part.phase is not Phase.RUNNING:
            return False
        # When all agents send Reset, the first one begins an episode. Those of the others find it running, and would
        # begin one more if the first agent did not count before it is in.
        enters = loop_agent.asked and self.may_enter(loop_agent, buffer)
        # One that follows takes nothing from its buffer, so `reading` says nothing of it.
        return loop_agent.follows or buffer.reading == part.episode or enters

    def _waits(self, loop_agent: LoopAgent) -> bool:
        """True if a player was in the running episode, which goes on without it."""
        (buffer,) = loop_agent.buffers
        entered = buffer.lane.episode if loop_agent.follows else buffer.entered
        return loop_agent.player and entered == self.environment.episode and not self._holds(loop_agent)

    def ask(self, loop_agent: LoopAgent, seed: int | None, options: object, restart: bool) -> None:
        """Take an agent's Reset: it gives up its episode.

        Args:
            loop_agent: The agent.
            seed: For the next episode; None: none.
            options: For the next episode; None: none.
            restart: True if it wants another episode than the running one.
        """
        seeded = seed is not None or bool(options)
        # As a robot is not reset twice, see `ClockPacer.ask_reset`.
        restart = restart and (seeded or not loop_agent.buffers[0].follows_anew)
        self.give_up(loop_agent, restart)
        if not loop_agent.player:
            return
        lane = self.environment
        if seeded:
            lane.seed, lane.options = seed, options
        if lane.phase is Phase.RUNNING:
            # One vote for each player: the others go on with their episode until the last of them asks too.
            over = restart and not any(self._holds(other) for other in self.loop_agents if other is not loop_agent)
        else:  # a reset that is under way is for another seed
            # A reset that is not given out yet takes its seed from the lane.
            over = lane.phase is Phase.FAILED or (seeded and not lane.asked)
        if over:
            self.ask_reset(0, lane.seed, lane.options)

    def give_up(self, loop_agent: LoopAgent, restart: bool = True) -> None:
        """Take an agent out of its episode; without `restart` it may enter the same one again."""
        (buffer,) = loop_agent.buffers
        part = buffer.lane
        buffer.abandon()
        if loop_agent.player:
            self.drop_action(part)
            loop_agent.asked = True
            if not restart and part.phase is Phase.RUNNING:
                # Else `may_enter` would keep the player out of an episode that it was in already.
                buffer.entered = 0

    def is_in_episode(self, loop_agent: LoopAgent) -> bool:
        """True if an agent has entered the episode that runs."""
        (buffer,) = loop_agent.buffers
        return buffer.lane.phase is Phase.RUNNING and buffer.reading == buffer.lane.episode

    def sit_out(self, loop_agent: LoopAgent) -> None:
        """Keep a player out of the episode that runs; it may enter the next one."""
        loop_agent.buffers[0].entered = self.environment.episode

    def end_deserted(self) -> bool:
        """Cut the running episode off if all its players have left it and one waits for the next; return whether."""
        lane = self.environment
        # With `autoreset=False` episodes are for `begin` and `end` to decide on, whoever plays.
        if not self._autoreset or lane.phase is not Phase.RUNNING or any(map(self._holds, self.loop_agents)):
            return False
        # Nobody waits for the next episode: default actions play on, until somebody joins.
        if not any(map(self._waits, self.loop_agents)):
            return False
        self.ask_reset(0, lane.seed, lane.options)
        return True
