"""Pacers of a program that does not wait for agents: each of its calls is a frame.

What the program is to do in its next frame is chosen ahead, and anew whenever somebody acts, so that it takes the
newest action without waiting. A frame of the world begins once it is known what the program took.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from bridge.core.encoding.properties import ENCODED, Property, PropertyTree
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
from bridge.core.worlds.settings import ResetRequest, Settings
from bridge.errors import Code, RequestError
from bridge.game.environment import GameEnvironment
from bridge.game.handover import Choice

__all__ = ["GameClock", "JointGameClock", "refuse_watcher"]

_TURNS = 10
"""Pauses in which a Step waits for news that are there."""


def refuse_watcher(caller: Agent | None) -> None:
    """Raise RequestError where who asks for a round of all agents only watches."""
    if caller is not None and caller.watches:
        text = "who only watches cannot ask for a round: expected a player; join as one where an agent is free"
        raise RequestError(Code.PERMISSION_DENIED, text)


class _Frames(FrameLoop):
    """A frame is due when the program has taken actions."""

    env: GameEnvironment

    def acting(self) -> Mapping[str, LoopLane]:
        """Return who acts, by name."""
        return {ONE: self.lanes[0]}

    def next_due(self) -> float | None:
        """Return when the next frame is due; None: none is."""
        lane = self.lanes[0]
        if self._start is None or lane.busy:
            return None
        return lane.retry_at if lane.phase is Phase.FAILED else self._start if self._is_due() else None

    def _is_due(self) -> bool:
        chosen = self.env.chosen
        return self.lanes[0].phase is Phase.RUNNING and chosen is not None and chosen.actions is not None

    def _begin_frame(self, now: float) -> bool:
        """Count a frame if one is due; return whether one is."""
        due = self._start is not None and not self.lanes[0].busy and self._is_due()
        self.frames += due
        return due

    def _choose(self, lane: LoopLane, now: float) -> Any:
        """Return the actions that the program has taken, and count them."""
        choice = self.env.chosen
        assert choice is not None, "as `_is_due` says"
        for name, part in self.acting().items():
            part.applied_by, part.applied_at = choice.by.get(name, ""), self.env.read_at
            if name in choice.fresh:
                choice.fresh.discard(name)
                part.unused = part.unused and part.acted_at != choice.came[name]
                self.actions_applied += 1
                part.action_delay = max(0.0, self.env.read_at - choice.came[name])
                self.action_delays.add(part.action_delay)
            self.default_frames += not part.applied_by
        return choice.actions

    def usable(self, name: str, part: LoopLane, now: float) -> bool:
        """True if the newest action of an agent may be applied now."""
        return part.acted_at > float("-inf") and not (
            self._max_action_age is not None and now - part.acted_at > self._max_action_age
        )


class _OneFrames(_Frames, RealtimeLoop):
    """Of a program with one agent."""

    def _choose(self, lane: LoopLane, now: float) -> Any:
        return super()._choose(lane, now)[ONE]


class _JointFrames(_Frames, JointLoop):
    """Of a program with several agents."""

    def acting(self) -> Mapping[str, LoopLane]:
        """Return those that are alive."""
        return {name: self.parts[name] for name in self.alive}

    def _choose(self, lane: LoopLane, now: float) -> Any:
        actions = super()._choose(lane, now)
        return {name: actions[name] for name in self.alive}

    def usable(self, name: str, part: LoopLane, now: float) -> bool:
        """True if the newest action of an agent may be applied now; an old one is not where a mask forbids it."""
        allowed = part.unused or self._may_repeat(name, part.observation, part.action)
        return super().usable(name, part, now) and allowed


class _ProgramPacer(FramePacer):
    """Follows a program, whose calls are the frames."""

    chooses_ahead = True
    loop: _Frames

    def bind(self, world: PacedWorld) -> None:
        """Begin with a world, whose environment is a `GameEnvironment`."""
        super().bind(world)
        assert isinstance(world.env, GameEnvironment), "its source makes no other"
        self._env = self.loop.env = world.env
        self._env.ahead, self._env.noticed = True, self._changed

    # What the program does next

    def choose_again(self) -> None:
        """Choose what the program takes in its next call: a round, or actions."""
        lane, handover = self.loop.lanes[0], self._env.handover
        if self.over:
            return
        if lane.asked:
            if self._env.asked and not handover.round_to_come(lane.seed, lane.options):
                handover.offer(Choice(None, lane.seed, lane.options))
            return
        if lane.phase is not Phase.RUNNING or handover.round_asked:
            return
        now, actions = self.now(), {**handover.default.actions, **self._stand_ins()}  # type: ignore[dict-item]
        choice = Choice(actions)
        by, came = dict[str, str](), dict[str, float]()
        for name, part in self.loop.acting().items():
            if self.loop.usable(name, part, now):
                actions[name], by[name], came[name] = part.action, part.player, part.acted_at
                if part.unused:
                    choice.fresh.add(name)
        choice.by, choice.came = by, came
        if self.world.substitution is not None:
            if self.group.several:
                living = {self.group.ids[name]: actions[name] for name in self.loop.acting()}
                replaced, choice.substitutes = self.world.substitution.substitute(living)
                actions.update({str(agent): action for agent, action in replaced.items()})
            else:
                actions[ONE], choice.substitutes = self.world.substitution.substitute(actions[ONE])
        choice.actions = kept(actions)
        handover.offer(choice)

    def _stand_ins(self) -> Mapping[str, Any]:
        """Return the actions that policies have chosen for agents that nobody plays."""
        return {}

    def act(self, agent: EnvAgent, action: object, received: float, episodes: Sequence[int]) -> None:
        """Leave an action for the next frame."""
        taken = self._env.handover.taken
        part = agent.part.loop_agent.buffers[0].lane
        # The program has it already, though its news are not read yet: it is not replaced.
        if part.unused and taken is not None and part.acted_at in taken.came.values():
            part.unused = False
        super().act(agent, action, received, episodes)
        self.choose_again()

    def ask_reset(self, loop_agent: LoopAgent, asked: ResetRequest) -> None:
        """Carry out an agent's Reset."""
        self._env.asked = self._env.asked or (loop_agent.player and asked.restart)
        super().ask_reset(loop_agent, asked)  # type: ignore[safe-super]  # the clock beside it has it
        self.choose_again()

    def prepare_reset(self, settings: Settings, caller: Agent | None) -> Callable[[], None]:
        """Take the settings of a ResetWorld, which no watcher may send."""
        refuse_watcher(caller)
        return super().prepare_reset(settings, caller)

    def carry_out_reset(self) -> None:
        """Cut off what runs, as a ResetWorld ordered."""
        self._env.asked = self._env.asked or self._ordered is not None
        super().carry_out_reset()
        self.choose_again()

    def dismiss(self, loop_agent: LoopAgent) -> None:
        """Take an agent out of the loop."""
        super().dismiss(loop_agent)
        self.choose_again()

    def rest(self, agent: EnvAgent) -> bool:
        """Keep an agent without a client, for which a default action stands in."""
        rests = super().rest(agent)
        self.choose_again()
        return rests

    # Frames

    def run_job(self, job: Job, at: float | None) -> Coroutine[Any, Any, None]:
        """Begin a reset or a frame; who stood in for agents in it is known from here on."""
        choice = self._env.chosen
        if job.kind == "step" and choice is not None and self.world.substitution is not None:
            self.world.substitution.substituted(choice.substitutes)
        return super().run_job(job, at)

    def _note(self, job: Job, now: float, spent: float, outcome: Outcome | None, error: str) -> None:
        """Tell the loop what came of a job, at the time at which the program called, and choose what follows."""
        super()._note(job, now if outcome is None else self._env.read_at, spent, outcome, error)  # type: ignore[safe-super]  # the clock beside it has it
        self.choose_again()

    def moment(self, lane: int) -> tuple[float, int, float]:
        """Return when the program took the actions at hand, the frame's number, and when the newest of them came."""
        came = [] if self._env.chosen is None else self._env.chosen.came.values()
        return self._env.read_at, self.loop.frames, max(came, default=float("nan"))

    # What clients hear

    async def step(self, agent: EnvAgent, action: object) -> int:
        """Take an agent's Step, which a program that stands still refuses."""
        self._refuse_standstill()
        await self._catch_up()
        return await super().step(agent, action)

    async def report(self, agent: EnvAgent) -> int:
        """Tell what happened since an agent's last Step; raises where the program stands still."""
        self._refuse_standstill()
        await self._catch_up()
        return await super().report(agent)

    async def _catch_up(self) -> None:
        """Wait until the news are told that the program has left already: so a Step tells the newest observation."""
        for _ in range(_TURNS):
            if not self._env.handover.unread:
                break
            soon: PendingResult[None] = PendingResult()
            self._scheduler.call_later(self._env.handover.pause, partial(soon.set_result, None))
            await soon

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

    def _fps(self) -> float:
        """Return the frames a second that the program made lately."""
        return self._env.handover.rate(self.options.fps)

    def describe(self) -> Mapping[str, object]:
        """Return what a page shows of it."""
        return {"fps": self._fps()}

    def properties(self) -> PropertyTree:
        """Return what the clock adds to the tree below `world`."""
        fps = Property("world.fps", ENCODED, "frames a second that the program made lately", self._fps)
        return super().properties().merged(PropertyTree([fps]))


class GameClock(_ProgramPacer, ClockPacer):
    """Follows a program with one agent."""

    LOOP = _OneFrames
    loop: _OneFrames


class JointGameClock(_ProgramPacer, JointClock):
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
