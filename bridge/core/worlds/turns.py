"""Turns: agents send actions, and a pacer decides when the environment is stepped, and by which action (D-22).

A sequence begins once the required agents have asked for it. From then on each agent's Step sends an action for the
turn and waits for the end of the turn, which is a step of the environment. An agent that ends early, or resets, waits
in its next Step for the next sequence. An agent that joins or appears during a sequence may enter it with its next
Step. If the environment was stepped without an agent's action, the agent's next Step returns what it has missed: the
newest observation, and the sum of the rewards.

`Turns` implements this, and asks a `TurnPacer` for decisions. Custom pacers derive from `TurnPacer`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gymnasium import spaces

from bridge.core.encoding.properties import PropertyTree
from bridge.core.worlds.agent import EnvAgent
from bridge.core.worlds.base import Agent, PacedWorld, answer_to, environment_failure, in_environment
from bridge.core.worlds.environment import Job, Result, Transition
from bridge.core.worlds.group import DEFAULT, Group
from bridge.core.worlds.pacer import Pacer
from bridge.core.worlds.participants import Participant, WaitingStep
from bridge.core.worlds.scheduling import PendingResult, Timer
from bridge.core.worlds.settings import Settings, read_reset, refuse_unknown
from bridge.core.worlds.turn_pacer import Decision, Turn, TurnPacer, refuse_lanes
from bridge.errors import Code, RequestError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["Turns"]


# The state is in a few fields. `poll` looks at every waiting Step until none of them leads to a change:
#
# - `turn.running`: a sequence runs. `_began` sets it. It ends when no participant plays any more, even if agents are
#   alive in the environment: agents without a client do not keep a sequence going.
# - `turn.ending`: the sequence was ended from outside, by a ResetWorld or a decision. Each playing agent is told by its
#   next Step and stops playing; after the last one both flags are False.
# - A participant's `sequence` and `playing`: it is in the sequence; or it was in it until its own end or Reset (same
#   number, not playing), and waits for the next one; or it was in an earlier one, or none, and may enter this one.
# - `outcome`: it ended while it had no waiting Step, because a default action was used for it. Its next Step reports
# it. - `absent`: it waited for a sequence that began without it. One error tells it so, and then it may go on waiting.
# - `_job`: a call of the environment runs. No Step is answered meanwhile, because the result may change the answer.
# While a message that may place the environment is answered, it is `_HELD`: no Step waits, and none is accepted.
#
# After a message has placed the environment, a sequence runs in which nobody plays yet: living agents may enter it with
# their next Step, as if they had appeared in the environment.
_HELD = Job(0, 0, "held")


class Turns(Pacer):
    """Collects the actions of agents, and steps the environment as a `TurnPacer` decides.

    Args:
        rules: Decides; it belongs to this world only.
    """

    SETTINGS = ("seed", "options")
    """The settings of a Reset."""

    def __init__(self, rules: TurnPacer) -> None:
        self.rules = rules
        """Decides when the environment is stepped, and by which action."""
        self.can_place = rules.can_place

    def bind(self, world: PacedWorld) -> None:
        """Attach the pacer to a world.

        Raises:
            SettingError: Its environment has lanes.
        """
        super().bind(world)
        facts = world.env.facts
        refuse_lanes(type(self.rules), facts.num_envs or 1)
        self.group = Group(facts, self.rules.players)
        self.group.spaces = {name: self.rules.spaces_of(name, spaces) for name, spaces in self.group.spaces.items()}
        self.participants: dict[str, Participant] = {}
        """The joined agents, by name."""
        self.carried: tuple[Any, object] = (None, None)
        """The seed and options of the next sequence."""
        self._names = tuple(self.group)
        self._waits: dict[Participant, WaitingStep] = {}
        self.turn = Turn(self._names, self.participants, self._waits)
        """The turn and its sequence."""
        self._resets = world.resets
        self._scheduler = world.scheduler
        self._job: Job | None = None
        self._acted: frozenset[str] = frozenset()
        """The agents whose Steps led to the job."""
        self._until = math.inf
        self._timer: Timer | None = None
        self._timer_at = math.inf
        self._changes_told = type(self.rules).told is not TurnPacer.told

    # Agents

    def join(self, settings: Settings) -> Agent:
        """Return the agent that the setting `agent` names, or the first free one."""
        refuse_unknown(settings, ("agent",) if len(self._names) > 1 else (), "JoinWorld")
        wanted = self.group.read(settings)
        self.world.refuse_if_over()
        remedy = f"wait until one is free, or {self.world.if_full}"
        name = self.group.choose(wanted, self.participants, self.world.title_in_messages, remedy)
        agent = EnvAgent(self, name, self.group.spaces[name])
        agent.pacer_state = self.participants[name] = Participant(name, agent)
        self.advance()
        return agent

    def leave(self, agent: EnvAgent) -> None:
        """Free an agent whose client leaves or has died. `TurnPacer.dropped` decides whether the sequence ends."""
        participant: Participant = agent.pacer_state
        if self.participants.get(participant.name) is participant:
            del self.participants[participant.name]
            self.turn.handed_in.pop(participant.name, None)
            self.drop(participant)
        self.advance()

    @property
    def agents(self) -> int:
        """The number of joined agents."""
        return len(self.participants)

    @property
    def players(self) -> Mapping[str, str]:
        """The players, by the name of the agent."""
        return {name: participant.agent.player for name, participant in self.participants.items()}

    def applied_by(self, lane: int) -> object:
        """Return the players of the current step; with several agents a dict by name, with `default` for nobody."""
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
        """Observation and info of the running episode; None: no episode runs, or there are several agents."""
        if self.group.several or not self.turn.running or not self.turn.latest:
            return None
        latest = self.turn.latest[self._names[0]]
        return latest.observation, latest.info

    def drop(self, participant: Participant) -> None:
        """Remove an agent from the running sequence."""
        was_playing, participant.playing, participant.outcome = participant.playing, False, None
        participant.may_enter = False
        self._settle()
        # If this was the last agent, `_settle` has cleared `running`, and no other agent is concerned.
        if was_playing and self.turn.running and self.rules.dropped(participant.name):
            self._end_sequence()

    def _settle(self) -> None:
        """End the sequence if nobody plays, and no agent that has appeared may enter."""
        # Called after each step. Usually the first agent still plays, so a loop is faster than a generator.
        for participant in self.participants.values():
            if participant.playing or (participant.may_enter and not self.turn.ending):
                return
        self.turn.running = self.turn.ending = False

    def _end_sequence(self) -> None:
        """End the sequence: the next Step of each playing agent reports it."""
        if not self.turn.ending:
            self.turn.ending = True
            # Like a ResetWorld for which nobody waits. `poll` answers waiting Steps; for later Steps the session checks
            # the `ResetBook`.
            self._resets.interrupt()

    # Requests

    def reset(self, agent: EnvAgent, settings: Settings, running: bool) -> None:
        """Leave the running sequence; seed and options are for the next one, which begins for all."""
        asked = read_reset(settings, self.SETTINGS, None)
        # In a joint reset one agent sends the settings: plain Resets of the others must not clear them.
        if asked.seed is not None or asked.options is not None:
            self.carried = (asked.seed, asked.options)
        if running or agent.pacer_state.may_enter:
            self.drop(agent.pacer_state)
            self.advance()

    async def begin(self, agent: EnvAgent) -> int:
        """Wait for the next sequence, or enter the running one."""
        self._refuse_if_held()
        self._resets.end(agent)  # a ResetWorld does not wait for an agent that waits here
        state = self._told(agent.pacer_state, await self._wait(agent.pacer_state, begins=True))
        agent.tell_names()
        return state

    async def step(self, agent: EnvAgent, action: object) -> int:
        """Record an action and wait for the end of the turn."""
        self._refuse_if_held()
        self.turn.handed_in[agent.pacer_state.name] = action
        return self._told(agent.pacer_state, await self._wait(agent.pacer_state, begins=False))

    def _wait(self, participant: Participant, *, begins: bool) -> PendingResult[int]:
        """Add a waiting Step; return its pending answer: the state to report.

        Args:
            participant: The participant of the Step.
            begins: See `WaitingStep`.
        """
        deadline = self._scheduler.now() + self.rules.patience
        wait = self._waits[participant] = WaitingStep(participant, deadline, begins)
        self._wake_at(deadline)
        self.advance()
        return wait.answer

    def _refuse_if_held(self) -> None:
        if self._job is _HELD:
            text = "a message is being answered that may put the environment elsewhere; Step once it is"
            raise RequestError(Code.FAILED_PRECONDITION, text)

    @contextlib.contextmanager
    def held(self, agent: EnvAgent) -> Iterator[None]:
        """Accept no Step meanwhile; raise RequestError if a Step waits, or a call of the environment runs."""
        if self._waits or self._job is not None:
            text = "Steps of agents of this world are under way; send the message once they are answered"
            raise RequestError(Code.FAILED_PRECONDITION, text)
        self._job = _HELD
        try:
            yield
        finally:
            self._job = None
            self._scheduler.call_soon(self.advance)

    def place(self, agent: EnvAgent, result: Result, lanes: Sequence[int]) -> int:
        """Begin a sequence in the environment's current state, which agents enter with their next Steps."""
        told, _ = self.group.told(Job(0, self.turn.sequence + 1, "reset"), result, self.turn.observation)
        self._begin_sequence(told)
        for participant in self.participants.values():
            participant.may_enter = participant.name in told
            participant.absent = not participant.may_enter
        self._settle()
        return pb.INTERRUPTED

    def _told(self, participant: Participant, state: int) -> int:
        """Fill in the results of an answered Step; return its state."""
        cut_off, participant.cut_off = participant.cut_off, False
        participant.tell(cut_off)
        return state

    def interrupt(self, agent: EnvAgent) -> None:
        """End the sequence for this agent, with its last observations."""
        agent.pacer_state.tell(True)
        self.drop(agent.pacer_state)
        self.advance()

    def properties_of(self, agent: EnvAgent) -> PropertyTree:
        """Return an agent's properties, below `world`: its spaces, and those of the pacer."""
        return super().properties_of(agent).merged(PropertyTree(self.rules.properties()))

    def hang_up(self, agent: EnvAgent) -> None:
        """Answer the Step of an agent whose client has gone."""
        if agent.pacer_state in self._waits:
            self._answer(agent.pacer_state, RequestError(Code.CANCELLED, "the client has hung up"))
        self.advance()

    def prepare_reset(self, settings: Settings, caller: Agent | None) -> Callable[[], None]:
        """End the sequence for all; the settings are for the next one."""
        asked = read_reset(settings, self.SETTINGS, None)
        before, carried = (self.carried, self.turn.ending), (asked.seed, asked.options)
        self.carried, self.turn.ending = carried, self.turn.running

        def undo() -> None:
            if self.carried is carried:  # otherwise another ResetWorld has arrived since
                self.carried, self.turn.ending = before

        self._scheduler.call_soon(self.advance)
        return undo

    def restart(self, caller: Agent | None) -> None:
        """Remove the caller from its sequence. The environment itself is reset when all begin the next one."""
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
            self.turn.handed_in.pop(participant.name, None)
        if isinstance(outcome, RequestError):
            answer.set_error(outcome)
        else:
            answer.set_result(outcome)

    def _end(self, error: RequestError) -> None:
        """Answer every waiting Step with an error: the world is over."""
        for participant in list(self._waits):
            self._answer(participant, error)

    def next_due(self) -> float | None:
        """Return when a Step will be late, or the next decision is due; None: never."""
        # No Step is late during a call of the environment, which may be slow.
        if self._job is not None:
            return None
        due = self._until
        for wait in self._waits.values():
            due = min(due, wait.deadline)
        return None if due == math.inf else due

    def poll(self, now: float) -> Job | None:
        """Answer Steps whose wait is over; return the environment's next job, if any."""
        if self.turn.ending:  # by a ResetWorld, perhaps while only agents that may enter are left
            self._settle()
        if self._job is not None:
            return None
        changed, turn, self._until = True, self.turn, math.inf
        # Repeat, because an answer may end the wait of others: it may end the sequence, or remove an awaited agent.
        while changed and self._job is None:
            changed, late = False, []
            for wait in list(self._waits.values()):
                participant = wait.participant
                # It was answered in this round, because of another agent's Step.
                if participant not in self._waits:
                    continue
                if wait.begins:
                    changed = self._look_at_first(wait, now) or changed
                    if self._job is not None:
                        return self._job
                elif self._is_over(participant):
                    changed = True
                elif now >= wait.deadline:
                    late.append(participant)
            if not changed and turn.running and not turn.ending:
                changed = self._carry_on(now, late)
        return self._job

    def _look_at_first(self, wait: WaitingStep, now: float) -> bool:
        """Answer a first Step if possible; return True if anything changed."""
        participant, expired = wait.participant, now >= wait.deadline
        # An agent that ended or was reset in this sequence waits for the next one, unless it appears in the environment
        # again. A new client that joins as this agent may enter.
        is_new = participant.sequence != self.turn.sequence or participant.may_enter
        if self.turn.running and not self.turn.ending and is_new and participant.name in self.turn.alive:
            self._enter(participant)
        elif self._may_begin(now, expired):
            self._job = Job(0, self.turn.sequence + 1, "reset", None, *self.carried)
            self.turn.latest = {}
        # Only if no new sequence can begin now, in which the agent may be alive.
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

    def _may_begin(self, now: float, expired: bool) -> bool:
        """Return True if the environment should be reset now."""
        turn = self.turn
        turn.now, turn.expired = now, expired
        # Playing agents would lose an episode that nobody has ended.
        if self.turn.running and not self.turn.ending and turn.playing:
            return False
        try:
            return self.rules.may_begin(turn)
        except (Exception, SystemExit) as error:  # raised by a user's pacer
            self._refuse(error, begins=True)
            return False

    def _refuse(self, error: BaseException, *, begins: bool) -> None:
        """Refuse the Steps that wait for a decision, because the pacer raised an exception."""
        answer = environment_failure(f"the pacer {type(self.rules).__name__}", error)
        self.world.report_failure(answer.message)
        for participant in [wait.participant for wait in self._waits.values() if wait.begins is begins]:
            self._answer(participant, answer)

    def _enter(self, participant: Participant) -> None:
        participant.enter(self.turn.sequence, self.turn.latest[participant.name])
        self._resets.start(participant.agent)
        self._answer(participant, pb.RUNNING)

    def asks(self, participant: Participant) -> bool:
        """True if an agent waits for a sequence to begin."""
        wait = self._waits.get(participant)
        return wait is not None and wait.begins

    def _awaited_for_start(self) -> list[str]:
        if self.turn.running:
            present = self.participants.values()
            return [participant.name for participant in present if participant.playing or participant.may_enter]
        ready = {wait.participant.name for wait in self._waits.values() if wait.begins}
        return [name for name in self._names if name not in ready]

    def _is_over(self, participant: Participant) -> bool:
        """Answer the Step of an agent whose sequence is over; return False if `decide` still needs its action."""
        # Fast path: this runs for each waiting Step after each event, and usually nothing is over.
        if participant.playing and participant.outcome is None and not (self.turn.ending or self._resets.orders):
            return False
        # The agent ended while a default action was used for it, so this action comes too late.
        if participant.outcome is not None:
            self._answer(participant, participant.take_outcome())
            return True
        # Not playing: the next sequence has begun without this agent, after the others' deadline.
        if self.turn.ending or not participant.playing or self._resets.is_due(participant.agent):
            participant.cut_off = True
            self.drop(participant)
            self._answer(participant, pb.INTERRUPTED)
            return True
        return False

    def _carry_on(self, now: float, late: Sequence[Participant]) -> bool:
        """Execute the decision of `decide`; return True if anything changed.

        Args:
            now: The time.
            late: The participants whose Steps have waited for too long.
        """
        self.turn.now, self.turn.expired = now, bool(late)
        try:
            decision = self.rules.decide(self.turn)
            if not isinstance(decision, Decision):
                raise TypeError(f"expected turn.step(…), turn.wait(…) or turn.end() of decide, got {decision!r:.80}")
            job = self._step_job(decision) if decision.kind == "step" else None
        except (Exception, SystemExit) as error:  # raised by a user's pacer
            self._refuse(error, begins=False)
            return False
        if job is not None:
            self._job = job
        elif decision.kind == "end":
            self._end_sequence()
            return True
        else:
            self._until = decision.until
            if decision.until != math.inf:
                self._wake_at(decision.until)
            # These agents still play: a refused Step changes nothing (D-2), and may be sent again.
            if late:
                gone = self.turn.gone  # these use default actions, so nobody waits for them
                missing = [name for name in self.turn.alive if name not in self.turn.handed_in and name not in gone]
                for participant in late:
                    self._answer(participant, self._late(missing))
        return bool(late)

    def _step_job(self, decision: Decision) -> Job:
        action, acted = decision.action, decision.by
        if self.group.several:
            given: Mapping[str, object] = {} if action is DEFAULT else action  # type: ignore[assignment]
            action = {name: given.get(name, DEFAULT) for name in self.turn.alive}
            self._acted = frozenset(given if acted is None else acted)
        else:
            if isinstance(action, Mapping) and not isinstance(self.group.spaces[self._names[0]][1], spaces.Dict):
                action = self._only_action(action)
            self._acted = frozenset(self.turn.handed_in if acted is None else acted)
        return Job(0, self.turn.sequence, "step", action)

    def _only_action(self, by_name: Mapping[str, object]) -> object:
        """Return the action of a single agent that was given as a dict by name."""
        if self.group.shared or not by_name.keys() <= set(self._names):
            raise TypeError(
                f"expected one action for the environment of turn.step(…), which {', '.join(self._names)} have "
                f"together, got a dict by name: {by_name!r:.80}"
            )
        return by_name.get(self._names[0], DEFAULT)

    def _late(self, missing: list[str]) -> RequestError:
        return RequestError(
            Code.DEADLINE_EXCEEDED,
            f"the world {self.world.name!r} waited {self.rules.patience_name}={self.rules.patience:g} s for the agents "
            f"{', '.join(missing)}; send the Step again to go on waiting, or leave",
        )

    # The environment

    def advance(self) -> None:
        """Answer Steps, start the environment's next job, and set the timer for what is due later."""
        try:
            self.world.refuse_if_over()
        except RequestError as error:
            self._end(error)
        job = self.poll(self._scheduler.now())
        if job is not None:
            self._scheduler.start(self._carry_out(job), self._carried_out)
        if self._timer is None and (due := self.next_due()) is not None:
            self._wake_at(due)

    def _wake_at(self, when: float) -> None:
        """Set the timer, unless it is due earlier."""
        # Keep an earlier timer: Steps are usually answered long before their deadline, and a timer for each Step would
        # cost more than the rest of `advance`.
        if self._timer is not None:
            if self._timer_at <= when:
                return
            self._timer.cancel()
        self._timer, self._timer_at = self._scheduler.call_at(when, self._timer_is_due), when

    def _timer_is_due(self) -> None:
        self._timer, due = None, self.next_due()
        if due is not None:
            if due <= self._scheduler.now():
                self.advance()
            else:
                self._wake_at(due)

    def stop(self) -> None:
        """Refuse all waiting Steps, because the world is over."""
        self.advance()
        if self._timer is not None:
            self._timer.cancel()

    async def _carry_out(self, job: Job) -> None:
        """Reset or step the environment, and pass the results to the agents."""
        try:
            seen, living = await self.group.carry_out(self.world.env, job, self.turn.observation, self._default_action)
        except RequestError:
            raise
        except Exception as error:  # the result of an environment with a single agent is malformed
            raise answer_to(job.kind, error) from error
        if self._changes_told:
            seen = {name: self.rules.told(name, transition) for name, transition in seen.items()}
        if job.kind == "reset":
            self._began(seen)
            return
        # The environment's episode ends with its last agent.
        self.world.episodes += not living
        self._stepped(seen, living)

    async def _default_action(self, name: str) -> object:
        agent, space = self.group.ids[name], self.group.spaces[name][1]
        choose, executor = self.rules.default_action, self.world.env.executor
        return await executor.run(in_environment, "step", choose, agent, self.turn.observation(name), space)

    def _carried_out(self, result: None, error: BaseException | None) -> None:
        if error is not None:
            self._failed(
                error if isinstance(error, RequestError) else RequestError(Code.INTERNAL, f"the step failed: {error!r}")
            )
        # Later, because `advance` may have called an environment of this thread, and has not returned yet.
        self._scheduler.call_soon(self.advance)

    def _began(self, first: Mapping[str, Transition]) -> None:
        """Handle a reset of the environment: answer waiting agents; `first` has all living agents, in order."""
        self._job = None
        # Cleared only now, so that after a failed reset the next one uses the seed.
        self.carried = (None, None)
        self._begin_sequence(first)
        self._settle()

    def _begin_sequence(self, first: Mapping[str, Transition]) -> None:
        self.turn.sequence += 1
        self.turn.began, self.turn.number = self._scheduler.now(), 0
        self.turn.running, self.turn.ending = True, False
        self.turn.alive = list(first)
        in_order = self.turn.alive == [name for name in self._names if name in first]
        self.turn.latest = dict(first)
        for participant in self.participants.values():
            # Includes participants without a waiting Step, whose next Steps belong to the old sequence.
            participant.playing = participant.may_enter = False
            participant.agents = () if in_order else self.turn.alive
            if self.asks(participant):
                if participant.name in self.turn.alive:
                    self._enter(participant)
                else:
                    # `poll` tells the agent, which would otherwise wait without knowing that the others play.
                    participant.sequence, participant.absent = self.turn.sequence, True

    def _stepped(self, seen: Mapping[str, Transition], alive: Sequence[str]) -> None:
        """Handle a step of the environment: pass the results to the agents.

        Args:
            seen: The transition of each agent that was alive before or is alive now.
            alive: The agents that are alive now.
        """
        # Do this first, while the job still shows who acted. An agent with a default action gets its result with its
        # next Step.
        acted, before = self._take_acted(), self.turn.alive
        self.turn.began = self._scheduler.now()
        self.turn.number += 1
        expected = []
        for name in before:
            told, participant = seen[name], self.participants.get(name)
            if not (told.terminated or told.truncated):
                expected.append(name)
            if participant is not None and participant.playing:
                participant.add(told)
        self.turn.latest.update(seen)
        self.turn.alive = list(alive)
        as_expected = self.turn.alive == expected
        for participant in self.participants.values():
            participant.agents = () if as_expected else self.turn.alive
            # If the living agents are as expected, no agent appeared in this step. Agents that appeared earlier may
            # still enter.
            if participant.may_enter or not as_expected:
                came = participant.name in alive and (participant.name not in expected or participant.may_enter)
                participant.may_enter = came and not participant.playing
        for participant in acted:
            self._answer(participant, participant.take_outcome())
        self._settle()

    def _failed(self, error: RequestError) -> None:
        """Handle an exception of the environment: refuse the Steps that led to the call."""
        # The sequence goes on, because a refused request changes nothing (D-2): agents may Step again or reset.
        acted = self._take_acted()
        for participant in acted:
            self._answer(participant, error)
        if not acted:
            self.world.report_failure(error.message)
        # Restart the turn's time, so that a pacer that waits for some time does not step a failing environment at once.
        self.turn.began = self._scheduler.now()

    def _take_acted(self) -> list[Participant]:
        """End the job; return the participants whose Steps led to it and still wait."""
        job, self._job = self._job, None
        if job is None or job.kind == "reset":
            return [wait.participant for wait in self._waits.values() if wait.begins]
        # An action that arrived while the agent's default action was used is for the next step.
        acted = self._acted
        return [each.participant for each in self._waits.values() if not each.begins and each.participant.name in acted]
