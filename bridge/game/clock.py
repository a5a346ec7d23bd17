"""Pacers of a program that does not wait for agents: each of its calls is a frame.

What the program is to do in its next frame is chosen ahead, and anew whenever somebody acts, so that it takes the
newest action without waiting. A frame of the world begins once it is known what the program took.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from bridge.core.encoding.tensors import Array
from bridge.core.worlds.agent import EnvAgent
from bridge.core.worlds.base import Agent, PacedWorld
from bridge.core.worlds.environment import Job, kept
from bridge.core.worlds.group import ONE
from bridge.core.worlds.realtime.clock_pacer import ClockPacer
from bridge.core.worlds.realtime.frame_loop import FrameLoop
from bridge.core.worlds.realtime.frame_pacer import FramePacer, Outcome
from bridge.core.worlds.realtime.joint_loop import JointLoop
from bridge.core.worlds.realtime.loop import RealtimeLoop
from bridge.core.worlds.realtime.loop_lane import LoopAgent, LoopLane, Phase
from bridge.core.worlds.realtime.multi_agent import JointClock
from bridge.core.worlds.scheduling import PendingResult
from bridge.core.worlds.settings import ResetRequest
from bridge.game.environment import GameEnvironment
from bridge.game.handover import Choice
from bridge.game.pacer import ProgramPacer

__all__ = ["GameClock", "JointGameClock"]

_TURNS = 30
"""Turns of the event loop that a Step gives news to be told that are there."""


class _Frames(FrameLoop):
    """A frame is due when the program has taken actions."""

    env: GameEnvironment
    parts: dict[str, LoopLane]
    """What each agent has of the round, by name."""
    alive: list[str]
    """The agents that act in the next frame."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._applied: dict[str, float] = {}
        """When the newest action came that was applied, by agent."""

    def _may_repeat(self, name: str, observation: object, action: object) -> bool:
        return True

    def acting(self) -> Mapping[str, LoopLane]:
        """Return the parts of those who act."""
        return {name: self.parts[name] for name in self.alive}

    def next_due(self) -> float | None:
        """Return when the next frame is due; None: none is."""
        lane = self.lanes[0]
        if self._start is not None and not lane.busy and lane.phase is Phase.FAILED:
            return lane.retry_at
        return self._start if self._is_due() else None

    def _is_due(self) -> bool:
        lane = self.lanes[0]
        free = self._start is not None and not lane.busy and lane.phase is Phase.RUNNING
        return free and self.env.chosen.actions is not None

    def _begin_frame(self, now: float) -> bool:
        """Return whether a frame is due; `count` counts it."""
        return self._is_due()

    def _may_rest(self) -> bool:
        """True: the program goes on by itself, and its next call takes the default action."""
        return True

    def count(self, passed: int, frames: int) -> None:
        """Count frames, before what came of the last of them is told.

        Args:
            passed: How many the program has made.
            frames: How many of them, the last ones, are of the step at hand; 0: it is a reset.
        """
        skipped = passed - frames - self.lanes[0].frames
        for lane in {self.lanes[0], *self.parts.values()}:
            lane.frames += skipped
        self.frames, self.step_frames = passed, frames
        self.default_frames += frames * sum(not part.applied_by for part in self.acting().values())

    def _choose(self, lane: LoopLane, now: float) -> Any:
        """Return the actions that the program has taken, and count them."""
        choice = self.env.chosen
        for name, part in self.acting().items():
            part.applied_by, part.applied_at = choice.by.get(name, ""), self.env.read_at
            came = choice.came.get(name)
            if came is not None and came != self._applied.get(name):
                self._applied[name] = came
                if part.acted_at == came:
                    part.unused = False
                elif part.unused:  # it came before it was known that the program had this one, which it did not replace
                    self.actions_replaced -= 1
                self.actions_applied += 1
                part.action_delay = max(0.0, self.env.read_at - came)
                self.action_delays.add(part.action_delay)
        return choice.actions

    def usable(self, name: str, part: LoopLane, now: float) -> bool:
        """True if the newest action of an agent may be applied now; an old one is not where a mask forbids it."""
        oldest = -math.inf if self._max_action_age is None else now - self._max_action_age
        if part.acted_at == -math.inf or part.acted_at < oldest:
            return False
        return part.unused or self._may_repeat(name, part.observation, part.action)


class _OneFrames(_Frames, RealtimeLoop):
    """Of a program with one agent."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.parts, self.alive = {ONE: self.lanes[0]}, [ONE]

    def _choose(self, lane: LoopLane, now: float) -> Any:
        return super()._choose(lane, now)[ONE]


class _JointFrames(_Frames, JointLoop):
    """Of a program with several agents."""

    def _choose(self, lane: LoopLane, now: float) -> Any:
        actions = super()._choose(lane, now)
        return {name: actions[name] for name in self.alive}


class _FramePacer(ProgramPacer, FramePacer):
    """Follows a program, whose calls are the frames."""

    chooses_ahead = True
    loop: _Frames

    def bind(self, world: PacedWorld) -> None:
        """Begin with a world, whose environment is a `GameEnvironment`."""
        super().bind(world)
        self.loop.env, self._env.noticed, self._env.closing = self._env, self._changed, self._begin_last
        self._newest: object = None
        """Whose actions were offered last, and when they came; None: others than agents' were in it."""

    # What the program does next

    def choose_again(self) -> None:
        """Choose what the program takes in its next call: a round, or actions."""
        lane, env = self.loop.lanes[0], self._env
        if self.over:
            return
        if lane.asked:
            if env.asked and not env.round_comes(lane.seed, lane.options):
                env.offer(Choice(None, lane.seed, lane.options))
            return
        if lane.phase is not Phase.RUNNING:
            return
        now, choice, stand_ins = self.now(), Choice(None), self._stand_ins()
        actions = {**env.handover.defaults, **stand_ins}
        for name, part in self.loop.acting().items():
            if self.loop.usable(name, part, now):
                actions[name], choice.by[name], choice.came[name] = part.action, part.player, part.acted_at
        substitution, newest = self.world.substitution, (env.stamp, choice.by, choice.came)
        if substitution is None and not stand_ins and newest == self._newest:
            return
        self._newest = newest if substitution is None else None
        if substitution is not None and self.group.several:
            living = {self.group.ids[name]: actions[name] for name in self.loop.acting()}
            replaced, choice.substitutes = substitution.substitute(living)
            actions.update({str(agent): action for agent, action in replaced.items()})
        elif substitution is not None:
            actions[ONE], choice.substitutes = substitution.substitute(actions[ONE])
        choice.actions = kept(actions)
        env.offer(choice)

    def _stand_ins(self) -> Mapping[str, Any]:
        """Return the actions that policies have chosen for agents that nobody plays."""
        return {}

    def act(self, agent: EnvAgent, action: object, received: float, episodes: Sequence[int]) -> None:
        """Leave an action for the next frame."""
        super().act(agent, action, received, episodes)
        self.choose_again()

    def ask_reset(self, loop_agent: LoopAgent, asked: ResetRequest) -> None:
        """Carry out an agent's Reset."""
        self._env.asked = self._env.asked or (loop_agent.player and asked.restart)
        super().ask_reset(loop_agent, asked)  # type: ignore[safe-super]  # the clock beside it has it

    def carry_out_reset(self) -> None:
        """Cut off what runs, as a ResetWorld ordered."""
        self._env.asked = self._env.asked or self._ordered is not None
        super().carry_out_reset()

    def dismiss(self, loop_agent: LoopAgent) -> None:
        """Take an agent out of the loop."""
        super().dismiss(loop_agent)
        self.choose_again()

    def rest(self, agent: EnvAgent) -> bool:
        """Keep an agent without a client, for which a default action stands in."""
        rests = super().rest(agent)
        self.choose_again()
        return rests

    def _changed(self) -> None:
        """Choose what follows a job or a Reset, before anybody is answered."""
        self.choose_again()
        super()._changed()

    # Frames

    def run_job(self, job: Job, at: float | None) -> Coroutine[Any, Any, None]:
        """Begin a reset or a frame; who stood in for agents in it is known from here on."""
        if job.kind == "step" and self.world.substitution is not None:
            self.world.substitution.substituted(self._env.chosen.substitutes)
        return super().run_job(job, at)

    def _begin_last(self) -> None:
        """Begin the frame that is due when the program is closed, which ends the episode."""
        while not self.over and (jobs := self.loop.poll(self.now())):
            for job in jobs:
                self._scheduler.start(self.run_job(job, None), lambda result, error: None)

    def _note(self, job: Job, now: float, spent: float, outcome: Outcome | None, error: str) -> None:
        """Tell the loop what came of a job, at the time at which the program called."""
        stepped = job.kind == "step" and outcome is not None
        self.loop.count(self._env.frames, self._env.step_frames if stepped else 0)
        super()._note(job, now if outcome is None else self._env.read_at, spent, outcome, error)  # type: ignore[safe-super]  # the clock beside it has it

    @property
    def frames(self) -> int:
        """How many frames the program has made."""
        return self._env.frames

    def moment(self, lane: int) -> tuple[float, float]:
        """Return when the program took the actions at hand, and when the newest of them came."""
        return self._env.read_at, max(self._env.chosen.came.values(), default=float("nan"))

    # What clients hear

    def act_on_arrival(self, agent: EnvAgent, action: object, actions: Mapping[int, Array]) -> float:
        """Leave an action for the next frames; raises where the program stands still."""
        self._refuse_standstill()
        return super().act_on_arrival(agent, action, actions)

    async def report(self, agent: EnvAgent) -> int:
        """Tell what happened since an agent's last Step; raises where the program stands still."""
        self._refuse_standstill()
        for _ in range(_TURNS):  # news that are there already are told, so that a Step tells the newest observation
            if not self._env.handover.unread:
                break
            soon: PendingResult[None] = PendingResult()
            self._scheduler.call_soon(partial(soon.set_result, None))
            await soon
        return await super().report(agent)

    async def wait_until(
        self, agent: Agent, ready: Callable[[], bool], seconds: float, reason: Callable[[], str | None]
    ) -> None:
        """Wait until `ready()`; raise also where the program stands still."""

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
        """Return the frames a second that the program made lately."""
        return self._env.handover.rate(self.options.fps)


class GameClock(_FramePacer, ClockPacer):
    """Follows a program with one agent."""

    LOOP = _OneFrames
    loop: _OneFrames


class JointGameClock(_FramePacer, JointClock):
    """Follows a program with several agents."""

    LOOP = _JointFrames
    loop: _JointFrames

    def bind(self, world: PacedWorld) -> None:
        """Begin with a world, as `GameClock.bind`."""
        self._standing: dict[str, Any] = {}
        super().bind(world)

    def _stand_ins(self) -> Mapping[str, Any]:
        return {name: action for name, action in self._standing.items() if not self.is_played(name)}

    def _note(self, job: Job, now: float, spent: float, outcome: Outcome | None, error: str) -> None:
        super()._note(job, now, spent, outcome, error)
        for name in self.stand_ins:
            if name in self.loop.alive and not self.is_played(name):
                self._scheduler.start(self._stand(name), lambda result, error: None)

    async def _stand(self, name: str) -> None:
        """Ask the policy that plays an agent; what it answers is for the next call."""
        self._standing[name] = await self._default_action(name)
        self.choose_again()
