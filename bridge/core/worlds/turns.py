"""Turns: agents hand in actions, and a pacer decides from them when the environment is stepped, and by what (D-22).

A sequence begins when those are there who have to be; from then on each agent's Step hands in an action for the turn
and waits for its end, which is a step of the environment. An agent that ends early, or resets, waits in its next Step
for the next sequence. One that comes during a sequence, or that the environment brings in, may enter it by its next
Step. Where the environment was stepped without an agent's action, its next Step tells what it has missed: the newest
observation, and the sum of the rewards.

`Turns` has all this, and asks a `TurnPacer` what to do, which a pacer of one's own derives from.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bridge.core.encoding.properties import Property, PropertyTree
from bridge.core.worlds.agent import EnvAgent
from bridge.core.worlds.base import OTHER_WORLD, Agent, PacedWorld, environment_failure, failures_in, in_environment
from bridge.core.worlds.environment import Job, Spaces, Transition, kept
from bridge.core.worlds.group import DEFAULT, Group, default_action
from bridge.core.worlds.pacer import Pacer
from bridge.core.worlds.rewards import as_number
from bridge.core.worlds.scheduling import PendingResult, Timer
from bridge.core.worlds.settings import Settings, read_reset, refuse_unknown
from bridge.errors import Code, RequestError, SettingError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["Decision", "Turn", "TurnPacer", "Turns", "refuse_lanes"]

_NOTHING = Transition(None)


@dataclasses.dataclass(eq=False)
class Participant:
    """A joined agent, and what its next Step will report."""

    name: str
    agent: EnvAgent
    """The agent: the world's `ResetBook` takes note of it, and it says who acts."""
    sequence: int = -1
    """The sequence that it last took part in."""
    playing: bool = False
    """True if an action of it is expected."""
    outcome: int | None = None
    """How its sequence ended, until a Step has told."""
    absent: bool = False
    """True if the sequence that it asked for began without it."""
    may_enter: bool = False
    """True if the environment has brought it into the running sequence, and its client has not entered yet."""
    agents: Sequence[str] = ()
    """Those that are alive, where its next Step has to tell them; none: as before, without those that ended."""
    told: Transition = _NOTHING
    """The last transition that its agent received."""
    reward: Any = None
    """The reward that no Step has told yet, of several their sum, a float; None: there is none."""
    cut_off: bool = False
    """True if the Step that is answered now tells that the sequence was ended from outside."""

    def take_outcome(self) -> int:
        """Return the state of the Step that is answered now."""
        state, self.outcome = self.outcome, None
        return pb.RUNNING if state is None else state


@dataclasses.dataclass
class _Wait:
    """A Step that waits."""

    participant: Participant
    deadline: float
    begins: bool
    """True if it is the first of a sequence."""
    action: object = None
    answer: PendingResult[int] = dataclasses.field(default_factory=PendingResult)
    """Its state, or why it is refused."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """A decision about a turn: made by `Turn.step`, `Turn.wait` and `Turn.end`."""

    kind: str
    """`step`, `wait` or `end`."""
    action: object = None
    """Of a step: the environment's action, or of several agents a mapping by name; `DEFAULT`: a default one."""
    by: Sequence[str] | None = None
    """Of a step: whose Steps it answers; None: those of all who have acted, of several agents of those in `action`."""
    until: float = math.inf
    """Of a wait: when to decide again at the latest."""


_WAIT = Decision("wait")


class Turn:
    """A turn of a sequence, from one step of the environment to the next, as a `TurnPacer` sees it.

    Args:
        turns: Whose it is.
        now: As the attribute.
        expired: As the attribute.
    """

    __slots__ = ("_turns", "expired", "now")

    def __init__(self, turns: Turns, now: float, expired: bool) -> None:
        self._turns = turns
        self.now = now
        """The time, in seconds of a clock that never goes back."""
        self.expired = expired
        """True if a Step has waited for `TurnPacer.patience` seconds: in `may_begin` one that asks to begin."""

    @property
    def names(self) -> Sequence[str]:
        """All agents that there may be."""
        return list(self._turns.group)

    @property
    def joined(self) -> Sequence[str]:
        """Those that clients have joined as."""
        return list(self._turns.participants)

    @property
    def asked(self) -> Sequence[str]:
        """Those whose clients wait for a sequence to begin."""
        return [name for name, one in self._turns.participants.items() if self._turns.asks(one)]

    @property
    def running(self) -> bool:
        """True if a sequence runs."""
        return self._turns.running

    @property
    def ending(self) -> bool:
        """True if it ends from outside, and somebody who plays was not told yet."""
        return self._turns.ending

    @property
    def began(self) -> float:
        """When the turn began: when the environment was reset or stepped, or failed. -inf: no sequence has begun."""
        return self._turns.turn_began

    @property
    def number(self) -> int:
        """How many steps the sequence has had: 0 in its first turn."""
        return self._turns.number

    @property
    def alive(self) -> Sequence[str]:
        """Those that act in this turn, whoever plays them, in the environment's order."""
        return self._turns.alive

    @property
    def playing(self) -> Sequence[str]:
        """Those of them that clients play."""
        return [name for name, one in self._turns.participants.items() if one.playing]

    @property
    def gone(self) -> Sequence[str]:
        """Those that clients have joined as who were in the sequence, and left it by a Reset or ended in it."""
        sequence = self._turns.sequence
        members = self._turns.participants.items()
        return [name for name, one in members if one.sequence == sequence and not one.playing]

    @property
    def actions(self) -> Mapping[str, Any]:
        """The actions that were handed in for this turn, by agent."""
        turns = self._turns
        return {name: turns.handed_in[name] for name in turns.alive if name in turns.handed_in}

    def observation(self, name: str) -> Any:
        """Return what an agent saw last; None: nothing yet."""
        return self._turns.seen(name)

    def step(self, action: object = DEFAULT, by: Sequence[str] | None = None) -> Decision:
        """Step the environment, which ends the turn.

        Args:
            action: Its action; of an environment of several agents a mapping by name, in which those that are missing
                do the default action. Left out: the default action, of all.
            by: Whose Steps are answered with what came of it; None: of all who have acted, of several agents of those
                in `action`. The Steps of others wait on.
        """
        return Decision("step", action, by)

    def wait(self, until: float = math.inf) -> Decision:
        """Wait until somebody acts, joins or leaves, or until a time after `now`, in seconds.

        Raises:
            ValueError: The time has passed.
        """
        if until == math.inf:
            return _WAIT
        if not until > self.now:
            raise ValueError(f"expected a time to wait until that is after now={self.now:g}, got {until!r}")
        return Decision("wait", until=until)

    def end(self) -> Decision:
        """End the sequence for all: their episodes are truncated."""
        return Decision("end")


class TurnPacer(abc.ABC):
    """Decides when an environment is stepped, and by which actions, from what its agents hand in.

    A pacer of one's own is a subclass with `decide`, which `serve_gym(world=…)` or `serve_parallel(world=…)` takes: an
    object of it is made for each world. It waits for nothing and needs no clock: the time is `turn.now`.

    An environment of several agents (`serve_parallel`) is stepped by the actions of all. One of `serve_gym` has one
    agent, named `agent`; with `players` several clients share it: all of them see the same, and `decide` makes one
    action of theirs.
    """

    players: Sequence[str] = ()
    """The names of those who share an environment of one agent; none: one client plays it."""
    patience: float = 30.0
    """Seconds that a Step waits; then it is refused with DEADLINE_EXCEEDED, and may be sent again."""
    patience_name = "patience"
    """What messages call that number."""

    @abc.abstractmethod
    def decide(self, turn: Turn) -> Decision:
        """Return what to do now: `turn.step(…)`, `turn.wait(…)` or `turn.end()`.

        Called while a sequence runs: when an agent has acted, joined or left, at the time that the last `turn.wait`
        named, and when a Step has waited for `patience` seconds. What it raises refuses the Steps that wait, and is
        logged.
        """

    def may_begin(self, turn: Turn) -> bool:
        """Return True to reset the environment for those who ask to begin: here once all agents have asked.

        Called for each Step that asks, while nobody plays, or a sequence ends. Who asks later enters the sequence that
        runs.
        """
        return not turn.running and len(turn.asked) == len(turn.names)

    def default_action(self, agent: Any, observation: Any, space: Any) -> Any:
        """Return an action for an agent that has none; called in the environment's thread.

        Args:
            agent: The environment's own id of it, or its name.
            observation: What it saw last.
            space: Its action space.
        """
        return default_action(agent, observation, space)

    def told(self, name: str, transition: Transition) -> Transition:
        """Return what an agent is told in place of what the environment gave, such as another reward.

        `dataclasses.replace(transition, reward=…)` makes another one.
        """
        return transition

    def spaces_of(self, name: str, spaces: Spaces) -> Spaces:
        """Return an agent's observation and action space, where those of the environment are not its own."""
        return spaces

    def dropped(self, name: str) -> bool:
        """Return True to end the sequence for all, since an agent left it: by a Reset, or its client is gone."""
        return False

    def properties(self) -> Sequence[Property]:
        """Return what it adds to the properties of its agents, below `world`."""
        return ()


# The state is in a few fields, and `poll` looks at every Step that waits until none of them leads to a change:
#
# - `_playing`: a sequence runs. `began` sets it. It ends when no participant plays any more, even if the environment's
#   agents are alive: those that nobody plays keep no sequence going.
# - `ending`: the sequence ends from outside, by a ResetWorld or a decision. Each agent that plays hears of it by its
#   next Step and plays no more; after the last one both are False.
# - A participant's `sequence` and `playing`: it is in the sequence; or was in it until its own end or Reset (the same
#   number, not playing), and waits for the next; or was in an earlier one, or none, and may enter this one.
# - `outcome`: its end came while no Step of it waited, because a default action stood in. Its next Step tells it.
# - `absent`: it waited for a sequence that began without it. An error tells it once, so that it may wait on.
# - `_job`: the environment is in a call. No Step is answered meanwhile: the result may change what it is to be told.
def refuse_lanes(pacer: object, lanes: int) -> None:
    """Raise SettingError where a pacer that takes turns is to step several lanes.

    Args:
        pacer: Its class, or what makes it, for the message.
        lanes: How many there are.
    """
    if lanes != 1:
        name = getattr(pacer, "__name__", repr(pacer))
        raise SettingError(
            f"{name} steps one environment, or one of several agents: expected num_envs=1, got {lanes} lanes"
        )


class Turns(Pacer):
    """Collects what agents hand in, and steps the environment as a `TurnPacer` says.

    Args:
        rules: Decides; of this world alone.
    """

    SETTINGS = ("seed", "options")
    """The settings of a Reset."""

    def __init__(self, rules: TurnPacer) -> None:
        self.rules = rules
        """Decides when the environment is stepped, and by what."""

    def bind(self, world: PacedWorld) -> None:
        """Begin with a world.

        Raises:
            SettingError: Its environment has lanes.
        """
        super().bind(world)
        facts = world.env.facts
        refuse_lanes(type(self.rules), facts.num_envs or 1)
        self.group = Group(facts, self.rules.players)
        self.group.spaces = {name: self.rules.spaces_of(name, spaces) for name, spaces in self.group.spaces.items()}
        self.participants: dict[str, Participant] = {}
        """The agents that are in, by name."""
        self.carried: tuple[Any, object] = (None, None)
        """Seed and options of the next sequence."""
        self.sequence = 0
        """How many sequences began."""
        self.alive: list[str] = []
        """Who acts in the next step, whoever plays them."""
        self.ending = False
        """True if the sequence ends from outside, and somebody was not told yet."""
        self.turn_began = -math.inf
        """When the environment was reset or stepped last, in seconds."""
        self.number = 0
        """The steps of the sequence."""
        self._names = tuple(self.group)
        self._resets = world.resets
        self._playing = False
        self._latest: dict[str, Transition] = {}
        self._waits: dict[Participant, _Wait] = {}
        self.handed_in: dict[str, Any] = {}
        """The actions of the Steps that wait, by agent."""
        self._job: Job | None = None
        self._acted: frozenset[str] = frozenset()
        """Whose Steps led to the job."""
        self._until = math.inf
        self._timer: Timer | None = None
        self._changes_told = type(self.rules).told is not TurnPacer.told

    # Who is in

    def join(self, settings: Settings) -> Agent:
        """Return the agent that the setting `agent` names, or the first that is free."""
        refuse_unknown(settings, ("agent",) if len(self._names) > 1 else (), "JoinWorld")
        wanted = self.group.read(settings)
        self.world.refuse_if_over()
        remedy = f"wait until one is free, or {OTHER_WORLD}"
        name = self.group.choose(wanted, self.participants, self.world.title_in_messages, remedy)
        agent = EnvAgent(self, name, self.group.spaces[name])
        agent.part = self.participants[name] = Participant(name, agent)
        self.advance()
        return agent

    def leave(self, agent: EnvAgent) -> None:
        """Free an agent whose client leaves or has died; `TurnPacer.dropped` says what that means for the others."""
        participant: Participant = agent.part
        if self.participants.get(participant.name) is participant:
            del self.participants[participant.name]
            self.handed_in.pop(participant.name, None)
            self.drop(participant)
        self.advance()

    @property
    def agents(self) -> int:
        """How many agents are in."""
        return len(self.participants)

    @property
    def players(self) -> Mapping[str, str]:
        """Who plays, by the name of the agent."""
        return {name: participant.agent.player for name, participant in self.participants.items()}

    def applied_by(self, lane: int) -> object:
        """Return who acts in the environment's step that is under way: of several agents by name, `default` nobody."""
        acting = {name: participant.agent.player for name, participant in self.participants.items()}
        if self.group.several:
            actions = {} if self._job is None else self._job.actions
            return {
                name: "default" if action is DEFAULT else acting.get(name, "default")
                for name, action in actions.items()
            }
        by = dict.fromkeys(acting[name] for name in self._names if name in self._acted and name in acting)
        return ", ".join(by) or "default"

    @property
    def newest(self) -> tuple[object, object] | None:
        """Observation and info of the running episode; None: none runs, or each of several agents has its own."""
        if self.group.several or not self._playing or not self._latest:
            return None
        latest = self._latest[self._names[0]]
        return latest.observation, latest.info

    def drop(self, participant: Participant) -> None:
        """Take an agent out of the running sequence."""
        was_playing, participant.playing, participant.outcome = participant.playing, False, None
        participant.may_enter = False
        self._settle()
        # `_settle` has cleared `_playing` if this was the last one: then there is nobody whom it concerns.
        if was_playing and self._playing and self.rules.dropped(participant.name):
            self._end_sequence()

    def _settle(self) -> None:
        """The sequence is over when nobody plays any more, and nobody was brought in who may."""
        present = self.participants.values()
        if not any(one.playing or (one.may_enter and not self.ending) for one in present):
            self._playing = self.ending = False

    def _end_sequence(self) -> None:
        """End the sequence: the next Step of each playing agent reports it."""
        if not self.ending:
            self.ending = True
            # As by a ResetWorld for which nobody waits. Steps that wait are answered by `poll`; before it hands over
            # any other one, the session asks the book.
            self._resets.interrupt()

    @property
    def running(self) -> bool:
        """True if a sequence runs."""
        return self._playing

    # Requests

    def reset(self, agent: EnvAgent, settings: Settings, running: bool) -> None:
        """Give up the running sequence; seed and options are for the next one, which begins for all."""
        asked = read_reset(settings, self.SETTINGS, None)
        # Of a joint reset one agent sends the settings: the plain Resets of the others must not take them back.
        if asked.seed is not None or asked.options is not None:
            self.carried = (asked.seed, asked.options)
        if running or agent.part.may_enter:
            self.drop(agent.part)
            self.advance()

    async def begin(self, agent: EnvAgent) -> int:
        """Wait for the next sequence, or enter the running one."""
        state = await self._wait(agent, begins=True)
        agent.tell_names()
        return state

    async def step(self, agent: EnvAgent, action: object) -> int:
        """Hand in an action and wait for the end of the turn."""
        return await self._wait(agent, begins=False, action=action)

    async def _wait(self, agent: EnvAgent, *, begins: bool, action: object = None) -> int:
        """Take a Step, and wait for its answer.

        Args:
            agent: Whose Step.
            begins: True if it is the first of a sequence, which waits for the next one, or enters the running one.
                Else it waits until the environment has stepped.
            action: Its action.
        """
        participant: Participant = agent.part
        if begins:
            self._resets.end(agent)  # while it waits, no ResetWorld waits for it
        wait = _Wait(participant, self.world.scheduler.now() + self.rules.patience, begins, action)
        self._waits[participant] = wait
        if not begins:
            self.handed_in[participant.name] = action
        self.advance()
        state = await wait.answer
        cut_off, participant.cut_off = participant.cut_off, False
        self._tell(agent, cut_off)
        return state

    def _tell(self, agent: EnvAgent, cut_off: bool) -> None:
        """Fill in what the Step at hand tells: all that the agent has not been told."""
        participant: Participant = agent.part
        told = participant.told
        agent.observation, agent.info = told.observation, told.info
        agent.terminated[...], agent.truncated[...] = told.terminated, told.truncated
        # What an earlier answer had to tell, and was asked for no info, is of no interest any more.
        agent.beside = {"agents": participant.agents} if participant.agents else {}
        if told.missing:
            agent.beside["missing"] = told.missing
        if cut_off:
            # The world ended the sequence, not the environment: it is truncated, with the last observation.
            agent.take_cut()
            agent.beside.clear()
        # After `take_cut`, which sets the reward to 0: what was earned until the end is still told.
        reward, participant.reward = participant.reward, None
        if reward is None:
            agent.reward[...] = 0.0
        else:
            agent.take_reward(reward)

    def interrupt(self, agent: EnvAgent) -> None:
        """End the sequence for this agent, with what it has seen last."""
        self._tell(agent, True)
        self.drop(agent.part)
        self.advance()

    def properties_of(self, agent: EnvAgent) -> PropertyTree:
        """Return what an agent adds to the tree below `world`: its spaces, and what the pacer adds."""
        return super().properties_of(agent).merged(PropertyTree(self.rules.properties()))

    def hang_up(self, agent: EnvAgent) -> None:
        """Answer the Step of an agent whose client has gone."""
        if agent.part in self._waits:
            self._answer(agent.part, RequestError(Code.CANCELLED, "the client has hung up"))
        self.advance()

    def prepare_reset(self, settings: Settings, caller: Agent | None) -> Callable[[], None]:
        """End the sequence for all; the settings are for the next one."""
        asked = read_reset(settings, self.SETTINGS, None)
        before, carried = (self.carried, self.ending), (asked.seed, asked.options)
        self.carried, self.ending = carried, self._playing

        def undo() -> None:
            if self.carried is carried:  # else another ResetWorld has come since
                self.carried, self.ending = before

        self.world.scheduler.call_soon(self.advance)
        return undo

    def restart(self, caller: Agent | None) -> None:
        """Take the caller out of its sequence; the environment itself is reset when all begin the next one."""
        for participant in self.participants.values():
            if participant.agent is caller:
                self.drop(participant)
                self.advance()
                break

    # Answers

    def _answer(self, participant: Participant, outcome: int | RequestError) -> None:
        wait = self._waits.pop(participant)
        answer = wait.answer
        if not wait.begins:
            self.handed_in.pop(participant.name, None)
        if isinstance(outcome, RequestError):
            answer.set_error(outcome)
        else:
            answer.set_result(outcome)

    def _end(self, error: RequestError) -> None:
        """Answer every Step that waits: the world is over."""
        for participant in list(self._waits):
            self._answer(participant, error)

    def next_due(self) -> float | None:
        """Return when a Step will have waited for too long, or a decision is due; None: never."""
        # A slow environment is nobody's fault: no Step is late while it is in a call.
        if self._job is not None:
            return None
        due = self._until
        for wait in self._waits.values():
            due = min(due, wait.deadline)
        return None if due == math.inf else due

    def poll(self, now: float) -> Job | None:
        """Answer Steps that need not wait longer; return the environment's next job, if any."""
        if self.ending:  # by a ResetWorld, perhaps while nobody played but those who may enter
            self._settle()
        if self._job is not None:
            return None
        changed, self._until = True, math.inf
        # An answer may be what others wait for: the sequence has ended, or an agent that was awaited is out of it.
        while changed and self._job is None:
            changed = False
            for wait in list(self._waits.values()):
                # Answered in this round, by what the Step of another agent led to.
                if wait.participant not in self._waits:
                    continue
                changed = (self._look_at_first if wait.begins else self._look_at_step)(wait, now) or changed
                if self._job is not None:
                    return self._job
            if not changed and self._playing and not self.ending:
                changed = self._carry_on(now)
        return self._job

    def _look_at_first(self, wait: _Wait, now: float) -> bool:
        """Check whether a first Step can be answered; return whether anything changed."""
        participant, expired = wait.participant, now >= wait.deadline
        # An agent that ended or was reset in this sequence waits for the next one, unless the environment brings it in
        # again. Another client that joins as it may enter.
        is_new = participant.sequence != self.sequence or participant.may_enter
        if self._playing and not self.ending and is_new and participant.name in self.alive:
            self._enter(participant)
        elif self._may_begin(Turn(self, now, expired)):
            self._job = Job(0, self.sequence + 1, "reset", None, *self.carried)
            self._latest = {}
        # Only where no new sequence can begin at once, which may have a part for the agent.
        elif participant.absent:
            participant.absent = False
            who = participant.name
            text = f"the environment began a sequence without the agent {who!r}; Step again for the next one, or leave"
            self._answer(participant, RequestError(Code.FAILED_PRECONDITION, text))
        elif expired:
            self._answer(participant, self._late(self._awaited_for_start()))
        else:
            return False
        return True

    def _may_begin(self, turn: Turn) -> bool:
        """Return whether the pacer has the environment reset now."""
        # Whoever plays would lose an episode that nobody has ended.
        if self._playing and not self.ending and turn.playing:
            return False
        try:
            return self.rules.may_begin(turn)
        except Exception as error:  # a user's own
            self._refuse(error, begins=True)
            return False

    def _refuse(self, error: Exception, *, begins: bool) -> None:
        """Refuse the Steps that wait for a decision, which raised something."""
        answer = environment_failure(f"the pacer {type(self.rules).__name__}", error)
        self.world.report_failure(answer.message)
        for participant in [wait.participant for wait in self._waits.values() if wait.begins is begins]:
            self._answer(participant, answer)

    def _enter(self, participant: Participant) -> None:
        participant.sequence, participant.playing = self.sequence, True
        participant.outcome, participant.absent, participant.reward = None, False, None
        told = self._latest[participant.name]
        # Brought in by the last step, it may have got something by it. It is alive, whatever that step said of an end
        # that it had before.
        if participant.may_enter and "reward" not in told.missing:
            participant.reward = kept(told.reward)
        participant.told = dataclasses.replace(told, terminated=False, truncated=False)
        participant.may_enter = False
        self._resets.start(participant.agent)
        self._answer(participant, pb.RUNNING)

    def asks(self, participant: Participant) -> bool:
        """True if an agent waits for a sequence to begin."""
        wait = self._waits.get(participant)
        return wait is not None and wait.begins

    def _awaited_for_start(self) -> list[str]:
        if self._playing:
            present = self.participants.values()
            return [participant.name for participant in present if participant.playing or participant.may_enter]
        ready = {wait.participant.name for wait in self._waits.values() if wait.begins}
        return [name for name in self._names if name not in ready]

    def _look_at_step(self, wait: _Wait, now: float) -> bool:
        """Check whether a Step with an action is over; return whether anything changed."""
        participant = wait.participant
        # It ended while a default action stood in for this agent, whose action now comes too late.
        if participant.outcome is not None:
            self._answer(participant, participant.take_outcome())
        # Not playing: the next sequence has begun without this agent, after the deadline of the others.
        elif self.ending or not participant.playing or (self._resets.orders and self._resets.is_due(participant.agent)):
            participant.cut_off = True
            self.drop(participant)
            self._answer(participant, pb.INTERRUPTED)
        else:
            return False
        return True

    def _carry_on(self, now: float) -> bool:
        """Do what `decide` says; return whether anything changed."""
        late: list[Participant] = []
        for wait in self._waits.values():
            if now >= wait.deadline and not wait.begins:
                late.append(wait.participant)  # noqa: PERF401 - nearly always none, and a list of a loop costs a call
        try:
            decision = self.rules.decide(Turn(self, now, bool(late)))
            if not isinstance(decision, Decision):
                raise TypeError(f"expected turn.step(…), turn.wait(…) or turn.end() of decide, got {decision!r:.80}")
            job = self._step_job(decision) if decision.kind == "step" else None
        except Exception as error:  # a user's own
            self._refuse(error, begins=False)
            return False
        if job is not None:
            self._job = job
        elif decision.kind == "end":
            self._end_sequence()
            return True
        else:
            self._until = decision.until
            # They still play: the Steps may be sent again, and change nothing until then (D-2).
            if late:
                gone = Turn(self, now, True).gone  # default actions play on for them, and nobody waits for that
                missing = [name for name in self.alive if name not in self.handed_in and name not in gone]
                for participant in late:
                    self._answer(participant, self._late(missing))
        return bool(late)

    def _step_job(self, decision: Decision) -> Job:
        action, by = decision.action, decision.by
        if self.group.several:
            given: Mapping[str, object] = {} if action is DEFAULT else action  # type: ignore[assignment]
            action = {name: given.get(name, DEFAULT) for name in self.alive}
            by = list(given) if by is None else by
        self._acted = frozenset(self.handed_in if by is None else by)
        return Job(0, self.sequence, "step", action)

    def _late(self, missing: list[str]) -> RequestError:
        return RequestError(
            Code.DEADLINE_EXCEEDED,
            f"the world {self.world.name!r} waited {self.rules.patience_name}={self.rules.patience:g} s for the agents "
            f"{', '.join(missing)}; send the Step again to go on waiting, or leave",
        )

    # The environment

    def advance(self) -> None:
        """Answer what can be answered, have the environment do what is due, and set the timer for what is not."""
        scheduler = self.world.scheduler
        try:
            self.world.refuse_if_over()
        except RequestError as error:
            self._end(error)
        job = self.poll(scheduler.now())
        if job is not None:
            scheduler.start(self._carry_out(job), self._carried_out)
        if self._timer is not None:
            self._timer.cancel()
        due = self.next_due()
        if due is not None:
            self._timer = scheduler.call_at(due, self.advance)

    def stop(self) -> None:
        """Tell those who wait for others that the world is gone."""
        self.advance()

    async def _carry_out(self, job: Job) -> None:
        """Reset or step the environment, and hand each agent its part."""
        with failures_in(job.kind):
            seen, living = await self.group.carry_out(self.world.env, job, self.seen, self._default_action)
        if self._changes_told:
            seen = {name: self.rules.told(name, transition) for name, transition in seen.items()}
        if job.kind == "reset":
            self._began(seen)
            return
        # An episode of the environment ends with its last agent.
        self.world.episodes += not living
        self._stepped(seen, living)

    async def _default_action(self, name: str) -> object:
        agent, space = self.group.ids[name], self.group.spaces[name][1]
        choose, executor = self.rules.default_action, self.world.env.executor
        return await executor.run(in_environment, "step", choose, agent, self.seen(name), space)

    def _carried_out(self, result: None, error: BaseException | None) -> None:
        if error is not None:
            self._failed(
                error if isinstance(error, RequestError) else RequestError(Code.INTERNAL, f"the step failed: {error!r}")
            )
        # Not at once: an environment of this thread was called by `advance`, which has not returned yet.
        self.world.scheduler.call_soon(self.advance)

    def seen(self, name: str) -> object:
        """Return the last observation of an agent in the sequence; None: there is none."""
        return self._latest[name].observation if name in self._latest else None

    def _began(self, first: Mapping[str, Transition]) -> None:
        """The environment was reset: answer the agents that wait for it; `first` has all that are alive, in order."""
        self._job = None
        # Here and not where the job is made: a reset that fails leaves the seed to the next one.
        self.carried = (None, None)
        self.sequence += 1
        self.turn_began, self.number = self.world.scheduler.now(), 0
        self._playing, self.ending = True, False
        self.alive = list(first)
        in_order = self.alive == [name for name in self._names if name in first]
        self._latest = dict(first)
        for participant in self.participants.values():
            # Also those whose Steps do not wait: what they send next belongs to a sequence that is over.
            participant.playing = participant.may_enter = False
            participant.agents = () if in_order else self.alive
            if self.asks(participant):
                if participant.name in self.alive:
                    self._enter(participant)
                else:
                    # `poll` tells it so, or it would wait without knowing that the others play.
                    participant.sequence, participant.absent = self.sequence, True
        self._settle()

    def _stepped(self, seen: Mapping[str, Transition], alive: Sequence[str]) -> None:
        """The environment was stepped: hand each agent its part.

        Args:
            seen: Of every agent that was alive, or is now.
            alive: The agents that go on.
        """
        # First, while it is known by the job who acted: an agent that a default action stood in for is told by its next
        # Step.
        acted, before = self._take_acted(), self.alive
        self.turn_began = self.world.scheduler.now()
        self.number += 1
        expected = [name for name in before if not seen[name].ended]
        for name in before:
            told, participant = seen[name], self.participants.get(name)
            if participant is not None and participant.playing:
                participant.told = told
                # Adds up over the steps that a late agent missed.
                if "reward" not in told.missing:
                    waits, reward = participant.reward, kept(told.reward)
                    participant.reward = reward if waits is None else self._sum(waits, reward)
                if told.ended:
                    # Kept as it is now: its Step may come later than further steps, which reuse the arrays.
                    end = kept((told.observation, told.info))
                    participant.told = dataclasses.replace(told, observation=end[0], info=end[1])
                    participant.playing = False
                    participant.outcome = pb.TERMINATED if told.terminated else pb.INTERRUPTED
        self._latest.update(seen)
        self.alive = list(alive)
        for name, participant in self.participants.items():
            participant.agents = () if self.alive == expected else self.alive
            came = name in alive and (name not in expected or participant.may_enter)
            participant.may_enter = came and not participant.playing
        for participant in acted:
            self._answer(participant, participant.take_outcome())
        self._settle()

    def _sum(self, one: Any, other: Any) -> Any:
        """Return the sum of two rewards, a float; of a reward space an array."""
        if self.world.env.facts.reward_space is not None:
            return one + other
        return as_number(one) + as_number(other)

    def _failed(self, error: RequestError) -> None:
        """The environment raised: the Steps that led to the call are refused."""
        # The sequence goes on: a refused request changes nothing (D-2), and the agents may Step again or reset.
        acted = self._take_acted()
        for participant in acted:
            self._answer(participant, error)
        if not acted:
            self.world.report_failure(error.message)
        # A pacer that waits for some time is to wait again, and not to step what fails over and over.
        self.turn_began = self.world.scheduler.now()

    def _take_acted(self) -> list[Participant]:
        """End the job; return those whose Steps led to it, and still wait."""
        job, self._job = self._job, None
        if job is None or job.kind == "reset":
            return [wait.participant for wait in self._waits.values() if wait.begins]
        # An action that came while a default one stood in for it is for the next step.
        acted = [wait.participant for wait in self._waits.values() if not wait.begins]
        return [participant for participant in acted if participant.name in self._acted]
