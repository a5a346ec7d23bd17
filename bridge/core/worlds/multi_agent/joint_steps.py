"""The joint steps of a world of several agents, without input, output, threads or time (D-22).

A sequence begins when all that must be there have sent their first Step; from then on the environment steps each time
that every agent's action is in. What happens where one is missing is the world's declared policy (`MissingAgent`).
An agent is missing when nobody has joined as it, when its client left or died, when it sent Reset, or when its Step
does not come within `agent_timeout`. An agent that ends early, or resets, waits in its next Step for the next sequence.
One that the environment brings in during a sequence, for the first time or again, may enter it by its next Step; until
then default actions play for it.

Requests go in (`begin`, `act`, `drop`, `cancel`). `poll` says what the environment has to do, whose result goes in by
`began`, `stepped` or `failed`; either answers Steps that wait, often those of many agents at once.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bridge.core.worlds.base import Agent
from bridge.core.worlds.default_actions import DEFAULT, check_default_action
from bridge.core.worlds.environment import Job, Transition, kept
from bridge.core.worlds.resets import ResetBook
from bridge.core.worlds.rewards import as_number
from bridge.core.worlds.scheduling import PendingResult
from bridge.errors import Code, RequestError, SettingError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["JointStepTable", "MissingAgent", "MultiAgentOptions", "Participant"]


class MissingAgent(str, enum.Enum):
    """Says what a world does while an agent is missing."""

    WAIT = "wait"
    """Wait for it, or for another client that joins as it, up to the deadline; then the Steps of those who wait are
    refused with DEADLINE_EXCEEDED, and may be sent again. An agent that sent Reset is played by default actions."""
    DEFAULT = "default"
    """Go on with a default action in its place: at once where it is not playing, after the deadline where it is."""
    END = "end"
    """End the sequence: each other agent gets its observations once with INTERRUPTED."""


@dataclasses.dataclass(frozen=True)
class MultiAgentOptions:
    """How the agents of a world are coordinated."""

    missing_agent: MissingAgent | str = MissingAgent.WAIT
    """Says what is done while an agent is missing."""
    agent_timeout: float = 30.0
    """Seconds that a Step waits for the other agents."""
    default_action: Callable[[object, object, object], object] | None = None
    """Gives the action of a missing agent from its id, its last observation and its action space; None: the first
    allowed action, or zeros within the bounds."""

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "missing_agent", MissingAgent(self.missing_agent))
        except ValueError:
            known = ", ".join(policy.value for policy in MissingAgent)
            raise SettingError(f"expected missing_agent to be one of {known}, got {self.missing_agent!r}") from None
        if not isinstance(self.agent_timeout, (int, float)) or not self.agent_timeout > 0:
            raise SettingError(f"expected agent_timeout to be a positive number of seconds, got {self.agent_timeout!r}")
        check_default_action(self.default_action)


_NOTHING = Transition(None)


@dataclasses.dataclass(eq=False)
class Participant:
    """A joined agent, and what its next Step will report."""

    name: str
    agent: Agent
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


# The state is in a few fields, and `poll` looks at every Step that waits until none of them leads to a change:
#
# - `_playing`: a sequence runs. `began` sets it. It ends when no participant plays any more, even if the environment's
#   agents are alive: those that nobody plays keep no sequence going.
# - `_ending`: the sequence ends from outside, by a ResetWorld or the policy `end`. Each agent that plays hears of it by
#   its next Step and plays no more; after the last one both are False.
# - A participant's `sequence` and `playing`: it is in the sequence; or was in it until its own end or Reset (the same
#   number, not playing), and waits for the next; or was in an earlier one, or none, and may enter this one.
# - `outcome`: its end came while no Step of it waited, because a default action stood in. Its next Step tells it.
# - `absent`: it waited for a sequence that began without it. An error tells it once, so that it may wait on.
# - `_job`: the environment is in a call. No Step is answered meanwhile: the result may change what it is to be told.
class JointStepTable:
    """Who plays, who waits, and what the environment does next.

    Args:
        world: The world's name, for messages.
        names: All agents of the environment.
        options: The policy.
        resets: Which agents a ResetWorld still has to tell.
    """

    def __init__(self, world: str, names: Sequence[str], options: MultiAgentOptions, resets: ResetBook) -> None:
        self._world = world
        self._names = tuple(names)
        self._options = options
        self._resets = resets
        self.participants: dict[str, Participant] = {}
        self.carried: tuple[Any, object] = (None, None)
        """Seed and options of the next sequence."""
        self.sequence = 0
        """How many sequences began."""
        self._playing = False
        self._ending = False
        self._alive: list[str] = []
        self._latest: dict[str, Transition] = {}
        self._waits: dict[Participant, _Wait] = {}
        self._job: Job | None = None

    # Who is in

    def join(self, participant: Participant) -> None:
        """Let a client play an agent that is free."""
        self.participants[participant.name] = participant

    def leave(self, participant: Participant) -> None:
        """Free an agent whose client leaves or has died; the policy says what that means for the others."""
        if self.participants.get(participant.name) is participant:
            del self.participants[participant.name]
            self.drop(participant)

    def drop(self, participant: Participant) -> None:
        """Take an agent out of the running sequence."""
        was_playing, participant.playing, participant.outcome = participant.playing, False, None
        participant.may_enter = False
        self._settle()
        # `_settle` has cleared `_playing` if this was the last one: then there is nobody to end the sequence for.
        if was_playing and self._playing and self._options.missing_agent is MissingAgent.END:
            self._end_sequence()

    def _settle(self) -> None:
        """The sequence is over when nobody plays any more, and nobody was brought in who may."""
        present = self.participants.values()
        if not any(one.playing or (one.may_enter and not self._ending) for one in present):
            self._playing = self._ending = False

    def _end_sequence(self) -> None:
        """End the sequence: the next Step of each playing agent reports it."""
        if not self._ending:
            self._ending = True
            # As by a ResetWorld for which nobody waits. Steps that wait are answered by `poll`; before it hands over
            # any other one, the session asks the book.
            self._resets.interrupt()

    # Requests

    def wait(self, participant: Participant, now: float, *, begins: bool, action: object = None) -> PendingResult[int]:
        """Take a Step; return what will answer it.

        Args:
            participant: Whose Step.
            now: The time.
            begins: True if it is the first of a sequence, which waits for the next one, or enters the running one.
                Else it waits until the environment has stepped with the actions of all.
            action: Its action.
        """
        if begins:
            self._resets.end(participant.agent)  # while it waits, no ResetWorld waits for it
        wait = _Wait(participant, now + self._options.agent_timeout, begins, action)
        self._waits[participant] = wait
        return wait.answer

    def cancel(self, participant: Participant) -> None:
        """Answer the Step of an agent whose client has gone."""
        if participant in self._waits:
            self._answer(participant, RequestError(Code.CANCELLED, "the client has hung up"))

    def end(self, error: RequestError) -> None:
        """Answer every Step that waits: the world is over."""
        for participant in list(self._waits):
            self._answer(participant, error)

    def prepare_reset(self, carried: tuple[object, object]) -> Callable[[], None]:
        """A ResetWorld: end the sequence for all; return what takes that back."""
        before = self.carried, self._ending
        self.carried, self._ending = carried, self._playing

        def undo() -> None:
            if self.carried is carried:  # else another ResetWorld has come since
                self.carried, self._ending = before

        return undo

    # Answers

    def _answer(self, participant: Participant, outcome: int | RequestError) -> None:
        answer = self._waits.pop(participant).answer
        if isinstance(outcome, RequestError):
            answer.set_error(outcome)
        else:
            answer.set_result(outcome)

    def next_due(self) -> float | None:
        """Return when a Step will have waited for too long; None: none waits."""
        # A slow environment is nobody's fault: no Step is late while it is in a call.
        if self._job is not None:
            return None
        return min((wait.deadline for wait in self._waits.values()), default=None)

    def poll(self, now: float) -> Job | None:
        """Answer Steps that need not wait longer; return the environment's next job, if any."""
        if self._ending:  # by a ResetWorld, perhaps while nobody played but those who may enter
            self._settle()
        changed = True
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
        return None

    def _look_at_first(self, wait: _Wait, now: float) -> bool:
        """Check whether a first Step can be answered; return whether anything changed."""
        participant, expired = wait.participant, now >= wait.deadline
        # An agent that ended or was reset in this sequence waits for the next one, unless the environment brings it in
        # again. Another client that joins as it may enter.
        is_new = participant.sequence != self.sequence or participant.may_enter
        if self._playing and not self._ending and is_new and participant.name in self._alive:
            self._enter(participant)
        elif self._may_start(expired):
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

    def _ready(self, participant: Participant) -> bool:
        wait = self._waits.get(participant)
        return wait is not None and wait.begins

    def _may_start(self, expired: bool) -> bool:
        if self._options.missing_agent is not MissingAgent.DEFAULT:
            # Also agents that nobody has joined as are waited for: the environment is reset once for all.
            ready = sum(wait.begins for wait in self._waits.values())
            return not self._playing and ready == len(self._names)
        # Those who wait for the next one have not to wait longer for somebody who may enter and does not.
        if self._playing and any(participant.playing for participant in self.participants.values()):
            # A sequence that ends waits until each agent that plays has heard of it by its Step. A silent one must not
            # hold up the others for longer than `agent_timeout`.
            return expired and self._ending  # those that were not told yet are told all the same
        return expired or all(self._ready(participant) for participant in self.participants.values())

    def _awaited_for_start(self) -> list[str]:
        if self._playing:
            present = self.participants.values()
            return [participant.name for participant in present if participant.playing or participant.may_enter]
        ready = {wait.participant.name for wait in self._waits.values() if wait.begins}
        return [name for name in self._names if name not in ready]

    def _look_at_step(self, wait: _Wait, now: float) -> bool:
        """Check whether a Step with an action can be answered; return whether anything changed."""
        participant = wait.participant
        # It ended while a default action stood in for this agent, whose action now comes too late.
        if participant.outcome is not None:
            self._answer(participant, participant.take_outcome())
        # Not playing: the next sequence has begun without this agent, after the deadline of the others.
        elif self._ending or not participant.playing or self._resets.is_due(participant.agent):
            participant.cut_off = True
            self.drop(participant)
            self._answer(participant, pb.INTERRUPTED)
        elif not (missing := self._missing()):
            self._job = self._step_job()
        elif now < wait.deadline:
            return False
        elif self._options.missing_agent is MissingAgent.DEFAULT:
            self._job = self._step_job()
        elif self._options.missing_agent is MissingAgent.END:
            self._end_sequence()
        else:
            # It still plays: the Step may be sent again, and changes nothing until then (D-2).
            self._answer(participant, self._late(missing))
        return True

    def _acts(self, name: str) -> _Wait | None:
        """The Step with an action of an agent, where one waits."""
        participant = self.participants.get(name)
        wait = None if participant is None else self._waits.get(participant)
        return None if wait is None or wait.begins else wait

    def _missing(self) -> list[str]:
        """Whose action has to be waited for."""
        missing = []
        for name in self._alive:
            participant = self.participants.get(name)
            # One that was in this sequence and has left it by Reset is not waited for: default actions play on for it.
            if participant is not None and participant.sequence == self.sequence:
                awaited = participant.playing
            else:
                # Nobody plays it, or the client that does has not entered yet: under `wait` somebody may still come.
                awaited = self._options.missing_agent is MissingAgent.WAIT
            if awaited and self._acts(name) is None:
                missing.append(name)
        return missing

    def _step_job(self) -> Job:
        waits = {name: self._acts(name) for name in self._alive}
        actions = {name: DEFAULT if wait is None else wait.action for name, wait in waits.items()}
        return Job(0, self.sequence, "step", actions)

    def applied_by(self) -> dict[str, str]:
        """Return who acts in the environment's step that is under way, by agent; `default`: nobody does."""
        acting = {name: participant.agent.player for name, participant in self.participants.items()}
        actions = {} if self._job is None else self._job.actions
        return {
            name: "default" if action is DEFAULT else acting.get(name, "default") for name, action in actions.items()
        }

    def _late(self, missing: list[str]) -> RequestError:
        return RequestError(
            Code.DEADLINE_EXCEEDED,
            f"the world {self._world!r} waited agent_timeout={self._options.agent_timeout:g} s for the agents "
            f"{', '.join(missing)}; send the Step again to go on waiting, or leave",
        )

    # The result of a job

    def seen(self, name: str) -> object:
        """Return the last observation of an agent in the sequence; None: there is none."""
        return self._latest[name].observation if name in self._latest else None

    def began(self, first: Mapping[str, Transition]) -> None:
        """The environment was reset: answer the agents that wait for it; `first` has all that are alive, in order."""
        self._job = None
        # Here and not where the job is made: a reset that fails leaves the seed to the next one.
        self.carried = (None, None)
        self.sequence += 1
        self._playing, self._ending = True, False
        self._alive = list(first)
        in_order = self._alive == [name for name in self._names if name in first]
        self._latest = dict(first)
        for participant in self.participants.values():
            # Also those whose Steps do not wait: what they send next belongs to a sequence that is over.
            participant.playing = participant.may_enter = False
            participant.agents = () if in_order else self._alive
            if self._ready(participant):
                if participant.name in self._alive:
                    self._enter(participant)
                else:
                    # `poll` tells it so, or it would wait without knowing that the others play.
                    participant.sequence, participant.absent = self.sequence, True
        self._settle()

    def stepped(self, seen: Mapping[str, Transition], alive: Sequence[str]) -> None:
        """The environment was stepped: hand each agent its part.

        Args:
            seen: Of every agent that was alive, or is now.
            alive: The agents that go on.
        """
        # First, while it is known by the job who acted: an agent that a default action stood in for is told by its next
        # Step.
        acted, before = self._take_acted(), self._alive
        expected = [name for name in before if not seen[name].ended]
        for name in before:
            told, participant = seen[name], self.participants.get(name)
            if participant is not None and participant.playing:
                participant.told = told
                # Adds up over the steps that a late agent missed.
                if "reward" not in told.missing:
                    waits, reward = participant.reward, kept(told.reward)
                    participant.reward = reward if waits is None else as_number(waits) + as_number(reward)
                if told.ended:
                    # Kept as it is now: its Step may come later than further steps, which reuse the arrays.
                    end = kept((told.observation, told.info))
                    participant.told = dataclasses.replace(told, observation=end[0], info=end[1])
                    participant.playing = False
                    participant.outcome = pb.TERMINATED if told.terminated else pb.INTERRUPTED
        self._latest.update(seen)
        self._alive = list(alive)
        for name, participant in self.participants.items():
            participant.agents = () if self._alive == expected else self._alive
            came = name in alive and (name not in expected or participant.may_enter)
            participant.may_enter = came and not participant.playing
        for participant in acted:
            self._answer(participant, participant.take_outcome())
        self._settle()

    def failed(self, error: RequestError) -> None:
        """The environment raised: the Steps that led to the call are refused."""
        # The sequence goes on: a refused request changes nothing (D-2), and the agents may Step again or reset.
        for participant in self._take_acted():
            self._answer(participant, error)

    def _take_acted(self) -> list[Participant]:
        """End the job; return those whose Steps led to it, and still wait."""
        job, self._job = self._job, None
        if job is None or job.kind == "reset":
            return [wait.participant for wait in self._waits.values() if wait.begins]
        # An action that came while a default one stood in for it is for the next step.
        acted = {name for name, action in job.actions.items() if action is not DEFAULT}
        return [wait.participant for wait in self._waits.values() if not wait.begins and wait.participant.name in acted]
