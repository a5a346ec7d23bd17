"""Pacers for a program that does not wait for agents: each of its calls is a frame.

The pacer chooses ahead what the program does in its next frame, and chooses again whenever somebody acts. So the
program takes the newest action without waiting. A frame of the world begins with what the program took; see
`bridge.game.frames`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from bridge.core.back_off import doubling_pause
from bridge.core.encoding.spaces import Layout
from bridge.core.encoding.tensors import Array
from bridge.core.worlds.agent import EnvAgent
from bridge.core.worlds.base import Agent, PacedWorld
from bridge.core.worlds.environment import Job, kept
from bridge.core.worlds.group import ONE
from bridge.core.worlds.realtime.clock_pacer import ClockPacer
from bridge.core.worlds.realtime.frame_pacer import FramePacer, Outcome
from bridge.core.worlds.realtime.loop_lane import RETRY, LoopAgent, Phase
from bridge.core.worlds.realtime.multi_agent import JointClock
from bridge.core.worlds.scheduling import PendingResult
from bridge.core.worlds.settings import ResetRequest
from bridge.errors import InvalidActionError, RequestError, TensorError
from bridge.game.frames import GameFrames, JointGameFrames, OneGameFrames
from bridge.game.handover import Choice
from bridge.game.pacer import ProgramPacer

__all__ = ["GameClock", "JointGameClock"]

_TURNS = 30
"""The most turns of the event loop for which a Step waits until queued news is reported."""


class _FramePacer(ProgramPacer, FramePacer):
    """Follows a program, whose calls are the frames."""

    chooses_ahead = True
    loop: GameFrames

    def bind(self, world: PacedWorld) -> None:
        """Attach the pacer to a world, whose environment must be a `GameEnvironment`."""
        super().bind(world)
        self.loop.env, self._env.noticed = self._env, self._changed
        self._offered: object = None
        """The players of the last offer and the arrival times of their actions; None if it had other actions too."""

    # The program's next choice

    def choose_again(self) -> None:
        """Choose what the program takes in its next call: the start of a requested round, or actions."""
        lane, env = self.loop.lanes[0], self._env
        if self.over:
            return
        if not lane.asked:
            if lane.phase is Phase.RUNNING:
                self._choose_actions()
        elif env.asked and not env.round_comes(lane.seed, lane.options):
            env.offer(Choice(None, lane.seed, lane.options))

    def _choose_actions(self) -> None:
        now, choice, stand_ins = self.now(), Choice(None), self._stand_ins()
        actions = {**self._env.handover.defaults, **stand_ins}
        for name, agent_lane in self.loop.acting().items():
            if self.loop.usable(name, agent_lane, now):
                actions[name], choice.by[name], choice.came[name] = (
                    agent_lane.action,
                    agent_lane.player,
                    agent_lane.acted_at,
                )
        choice.stood_in = [name for name in stand_ins if name not in choice.by]
        # A policy or an observer may choose another action each time. Unchanged actions of agents are offered once.
        by_agents = not stand_ins and self.world.substitution is None
        offered = (self._env.stamp, choice.by, choice.came) if by_agents else None
        if by_agents and offered == self._offered:
            return
        self._offered = offered
        choice.actions = kept(self._substituted(actions, choice))
        self._env.offer(choice)

    def _substituted(self, actions: dict[str, Any], choice: Choice) -> dict[str, Any]:
        """Return the actions after observers have replaced some, and record the replacements in `choice`."""
        substitution = self.world.substitution
        if substitution is None:
            return actions
        if not self.group.several:
            action, choice.substitutes = substitution.substitute(actions[ONE])
            return {ONE: action}
        living = {self.group.ids[name]: actions[name] for name in self.loop.acting()}
        replaced, choice.substitutes = substitution.substitute(living)
        return {**actions, **{str(agent): action for agent, action in replaced.items()}}

    def _stand_ins(self) -> Mapping[str, Any]:
        """Return the actions that policies chose for agents without a player."""
        return {}

    def act(self, agent: EnvAgent, action: object, received: float, episodes: Sequence[int]) -> None:
        """Record an action for the next frame."""
        super().act(agent, action, received, episodes)
        self.choose_again()

    def ask_reset(self, loop_agent: LoopAgent, asked: ResetRequest) -> None:
        """Carry out an agent's Reset. After an end, join the next round if the program has just begun it by itself."""
        if self._enters_new(loop_agent, asked):
            asked = dataclasses.replace(asked, restart=False)
        self._env.asked = self._env.asked or (loop_agent.player and asked.restart)
        super().ask_reset(loop_agent, asked)  # type: ignore[safe-super]  # the clock class defines it

    def _enters_new(self, loop_agent: LoopAgent, asked: ResetRequest) -> bool:
        """True if a Reset follows the end of a round, and the next round has run for one second at most."""
        lane, (buffer,) = self.loop.lanes[0], loop_agent.buffers
        plain = asked.seed is None and not asked.options
        follows = 0 < buffer.entered == lane.episode - 1 and not buffer.closing
        return plain and follows and (lane.phase is Phase.RESETTING or buffer.lane.length <= self.rate())

    def carry_out_reset(self) -> None:
        """End the running round, as a ResetWorld ordered."""
        self._env.asked = self._env.asked or self._ordered is not None
        super().carry_out_reset()

    def dismiss(self, loop_agent: LoopAgent) -> None:
        """Remove an agent from the loop."""
        super().dismiss(loop_agent)
        self.choose_again()

    def rest(self, agent: EnvAgent) -> bool:
        """Keep an agent whose client has left; the default action is used for it."""
        rests = super().rest(agent)
        self.choose_again()
        return rests

    def _changed(self) -> None:
        """Choose what follows a job or a Reset, before any request is answered."""
        self.choose_again()
        super()._changed()

    # Frames

    def run_job(self, job: Job, at: float | None) -> Coroutine[Any, Any, None]:
        """Begin a reset or a frame. The actions that observers replaced in it are reported first."""
        if job.kind == "step" and self.world.substitution is not None:
            self.world.substitution.substituted(self._env.chosen.substitutes)
        return super().run_job(job, at)

    def _note(self, job: Job, now: float, spent: float, outcome: Outcome | None, error: str) -> None:
        """Report the outcome of a job to the loop, at the time of the program's call."""
        stepped = job.kind == "step" and outcome is not None
        self.loop.count(self._env.frames, self._env.step_frames if stepped else 0)
        super()._note(job, now if outcome is None else self._env.read_at, spent, outcome, error)  # type: ignore[safe-super]  # the clock class defines it

    @property
    def frames(self) -> int:
        """How many frames the program has made."""
        return self._env.frames

    def moment(self, lane: int) -> tuple[float, float]:
        """Return when the program took the current actions, and when the newest of them arrived."""
        return self._env.read_at, max(self._env.chosen.came.values(), default=float("nan"))

    # Answers to clients

    def act_on_arrival(self, agent: EnvAgent, action: object, actions: Mapping[int, Array]) -> float:
        """Record an action for the next frames; raise if the program stands still."""
        self._refuse_standstill()
        return super().act_on_arrival(agent, action, actions)

    async def report(self, agent: EnvAgent) -> int:
        """Report what happened since an agent's last Step; raise if the program stands still."""
        self._refuse_standstill()
        await self._read_on()
        return await super().report(agent)

    async def _read_on(self) -> None:
        """Read queued news first, so that what follows is about the newest observation."""
        for _ in range(_TURNS):
            if not self._env.handover.unread:
                break
            soon: PendingResult[None] = PendingResult()
            self._scheduler.call_soon(partial(soon.set_result, None))
            await soon

    async def wait_until(
        self, agent: Agent, ready: Callable[[], bool], seconds: float, reason: Callable[[], str | None]
    ) -> None:
        """Wait until `ready()` is true; raise if the program stands still."""

        def so_far() -> bool:
            if ready():
                return True
            self._refuse_standstill()
            return False

        await super().wait_until(agent, so_far, seconds, reason)

    def _refuse_standstill(self) -> None:
        if (still := self._env.standstill()) is not None:
            raise still

    def rate(self) -> float:
        """Return the program's recent frame rate, in frames per second."""
        return self._env.handover.rate(self.options.fps)


class GameClock(_FramePacer, ClockPacer):
    """Follows a program with one agent."""

    LOOP = OneGameFrames
    loop: OneGameFrames


class JointGameClock(_FramePacer, JointClock):
    """Follows a program with several agents."""

    LOOP = JointGameFrames
    loop: JointGameFrames

    def bind(self, world: PacedWorld) -> None:
        """Attach the pacer to a world; see `GameClock.bind`."""
        self._standing: dict[str, Any] = {}
        """What policies have chosen for the next call, by agent."""
        self._asking = False
        self._failures: dict[str, tuple[int, float]] = {}
        """How often in a row an agent's policy has failed, and when it is asked again."""
        super().bind(world)

    def _stand_ins(self) -> Mapping[str, Any]:
        return {name: action for name, action in self._standing.items() if not self.is_played(name)}

    def _stand_in(self, name: str) -> str:
        """Return who acted for an agent that nobody plays: a policy only where it has answered in time."""
        return f"agent:{self.stand_ins[name].name}" if name in self._env.chosen.stood_in else "default"

    def _note(self, job: Job, now: float, spent: float, outcome: Outcome | None, error: str) -> None:
        super()._note(job, now, spent, outcome, error)
        if job.kind == "reset":
            self._standing.clear()
        if self.stand_ins and not self._asking:
            self._asking = True
            self._scheduler.start(self._ask_policies(), lambda result, error: None)

    async def _ask_policies(self) -> None:
        """Ask the policies of agents that nobody plays for the next call; a slow one leaves frames out."""
        try:
            await self._read_on()  # agents are told first, and a policy about the newest observation alone
            for name in self.stand_ins:
                failures, again = self._failures.get(name, (0, 0.0))
                if self.is_played(name) or name not in self.loop.alive:
                    self._standing.pop(name, None)
                elif self.now() >= again:
                    await self._ask_policy(name, failures + 1)
        finally:
            self._asking = False
        self.choose_again()

    async def _ask_policy(self, name: str, failures: int) -> None:
        layout, episode = Layout(self.group.spaces[name][1], "action"), self.loop.environment.episode
        try:
            action = await self._default_action(name)
            # As a client's: the program is promised an element of the space.
            action = layout.unpack(layout.pack_action(action), check=True)
        except (RequestError, InvalidActionError, TensorError) as error:
            self._standing.pop(name, None)  # the default action stands in
            self._failures[name] = failures, self.now() + doubling_pause(failures, *RETRY)
            self.world.report_failure(f"the policy of {name!r} has failed, and the default action stands in: {error}")
            return
        self._failures.pop(name, None)
        if episode == self.loop.environment.episode:
            self._standing[name] = action
