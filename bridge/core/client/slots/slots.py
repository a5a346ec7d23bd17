"""The slots of a vector environment: their pool and stepper, copies, and requests to all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.core.client.attributes import missing_attributes
from bridge.core.client.slots.results import slot_states
from bridge.core.client.slots.slot import COUNTS, STEPPED, LinkState, Member, RemoteReport, SlotState
from bridge.core.client.slots.stepper import Stepper
from bridge.core.client.slots.vector_pool import Question, VectorPool
from bridge.core.client.turns import CallOrder
from bridge.core.client.world.extensions import (
    attribute_write,
    call_request,
    call_results,
    is_method,
    property_request,
    property_value,
)
from bridge.core.client.world.remote import Remote
from bridge.core.client.world.world_request import WorldInfo
from bridge.core.encoding.message_form import MessageForm
from bridge.core.encoding.tensors import Array
from bridge.core.ownership import forget_in_child
from bridge.errors import (
    AlreadyPendingError,
    ConnectionLostError,
    RemoteError,
    RemoteTimeoutError,
    ResetNeededError,
    SettingError,
)
from bridge.pb import dm_env_rpc_pb2 as pb

if TYPE_CHECKING:
    from bridge.core.client.messages import MessageAnswer, MessageTarget, MessageWriter

__all__ = ["Slots"]


class Slots:
    """The remotes of a vector environment, with their stepper, method calls and call order.

    In a copy and in a forked process the remotes have no connection; they connect in the first `reset`.

    Args:
        pool: The pool of joined remotes.
        pacer: See `Stepper`.
    """

    def __init__(self, pool: VectorPool, pacer: Callable[[], None] | None = None) -> None:
        self.pool = pool
        """Waits for the remotes."""
        self._members = pool.members
        self.stepper = stepper = Stepper(pool, pacer)
        """Steps the slots."""
        # Aliases rather than methods that forward: those would add a call to each step.
        self.begin_reset, self.finish_reset = stepper.begin_reset, stepper.finish_reset
        self.begin_step, self.finish_step = stepper.begin_step, stepper.finish_step
        self.wait_for_all, self.take_results = stepper.wait_for_all, stepper.take_results
        self.send, self.recv = stepper.send, stepper.recv
        self.order = CallOrder(pool, pool.turn)
        """Serialises calls: each call is a block of it."""
        forget_in_child(self)

    def __getstate__(self) -> dict[str, Any]:
        # Without episodes: they belong to the original, or to the parent process.
        return {"pool": self.pool, "pacer": self.stepper.pacer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def after_fork(self) -> None:
        """Leave the connections to the parent process. The next `reset` makes new ones for this process."""
        self.pool.after_fork()
        self.__setstate__(self.__getstate__())

    # The end

    def close(self) -> None:
        """Leave the worlds and disconnect. No other call may follow."""
        with self.order:
            self.order.pending = None
            self.pool.close_all(2.0)

    def abandon(self) -> None:
        """Close the connections of a garbage-collected environment, without waiting."""
        # At the end of the interpreter another thread may hold the lock for ever. The sockets then close with the
        # process.
        if not self.pool.is_frozen():
            self.pool.close_all(0.0)

    # Settings for wrappers that control the stepping

    @property
    def pacer(self) -> Callable[[], None] | None:
        """Called in each step between sending actions and requesting their results; None: nothing is called."""
        return self.stepper.pacer

    @pacer.setter
    def pacer(self, pacer: Callable[[], None] | None) -> None:
        self.stepper.pacer = pacer

    def wait_for_lanes(self) -> None:
        """Make real-time worlds of lanes answer only when every lane has an observation."""
        self._members.wait_for_lanes()

    def limit_steps(self, seconds: float) -> None:
        """Cut a world that has not answered a Step after `seconds`, instead of after the timeout."""
        self.pool.step_timeout = seconds

    def begin_in_step(self) -> None:
        """Begin the next episodes of lanes that end in the next step in the same request, if their server can."""
        self.stepper.begins_in_step = True

    # Where the slots are

    @property
    def count(self) -> int:
        """The number of slots."""
        return len(self._members.at)

    @property
    def timeout(self) -> float:
        """Seconds to wait for any answer."""
        return self.pool.timeout

    def world_info(self) -> WorldInfo:
        """Return the information about the worlds, which all have equal spaces."""
        return self._members.world_info()

    def remotes(self) -> list[Remote]:
        """Return the remotes that fill slots, in the slots' order."""
        return [member.remote for member in self._members.filling]

    def remote_of_each(self) -> list[Remote]:
        """Return the remote of each slot."""
        return [member.remote for member in self._members.at]

    def has_spare(self, slot: int) -> bool:
        """Return True if a spare is ready to take over a slot."""
        return self.pool.has_spare(self._members.at[slot])

    def states(self) -> Array:
        """Return the state of each slot: an int64 array `(num_envs,)` of `SlotState`."""
        return slot_states(self._members)

    def remote_reports(self) -> tuple[RemoteReport, ...]:
        """Return a report on each remote, spares last."""
        now = time.monotonic()
        return tuple(member.report(now) for member in self.pool.everybody())

    def report(self) -> dict[str, float]:
        """Return the result of `RemoteVectorEnv.report`."""
        return _flat_report(self.remote_reports(), self.states(), self.pool.stalled)

    # Attributes, methods and properties of the environments

    def begin_call(
        self,
        slots: Sequence[int],
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        look: bool = False,
    ) -> None:
        """Request a method call in some slots; `call_results` waits for the results.

        Args:
            slots: The slots.
            name: The name of the method.
            args: Its arguments.
            kwargs: Its keyword arguments.
            look: True: do not call, but ask for the values of an attribute, or whether it is a method; `looks` waits
                for the results.
        """

        def write(member: Member, lanes: list[int]) -> pb.EnvironmentRequest:
            chosen = () if len(lanes) == member.lanes else lanes
            return call_request(name, args, kwargs, chosen, look=look, columns=member.remote.reads_columns)

        self._ask(f"look at {name}" if look else f"call of {name}", write, slots)

    def call_results(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the results of `begin_call`; return one for each slot, in the order of its `slots`."""
        found: dict[int, Any] = {}
        with missing_attributes():
            question = self._wait_for_replies(timeout)
        for member, message in question.answers.items():
            lanes = question.lanes[member]
            results = call_results(message, member.remote.url, len(lanes))
            found.update(zip((member.start + lane for lane in lanes), results, strict=True))
        return tuple(found[slot] for slot in question.slots)

    def looks(self) -> dict[int, Any]:
        """Wait for the results of `begin_call(look=True)`; return attribute values by slot.

        Slots in which the name is a method are left out.
        """
        found: dict[int, Any] = {}
        for member, message in (question := self._wait_for_replies()).answers.items():
            lanes = question.lanes[member]
            if not is_method(message, member.remote.url):
                results = call_results(message, member.remote.url, len(lanes))
                found.update(zip((member.start + lane for lane in lanes), results, strict=True))
        return found

    def set_attr(self, name: str, items: Sequence[Any], slots: Sequence[int] | None = None) -> None:
        """Set an attribute in the worlds of some slots, or of all.

        Args:
            name: The attribute.
            items: A value for every slot.
            slots: Slots of the worlds to set; all lanes of a world are set together.
        """
        with self.order, missing_attributes():
            self.order.check(f"setting of {name}")

            def write(member: Member, lanes: list[int]) -> pb.EnvironmentRequest:
                return attribute_write(name, items[member.slots], columns=member.remote.reads_columns)

            self._ask(f"setting of {name}", write, slots)
            self._wait_for_replies()

    def send_message(
        self, form: MessageForm, write: MessageWriter, slots: Sequence[int] | None
    ) -> tuple[list[MessageAnswer], RemoteError | None]:
        """Send a message to the worlds of some slots, or of all, and wait for the answers. Called inside `order`.

        Slots that the message moved to another state have a first observation to hand out.

        Returns:
            The answers, and the first error; None: there was no error.
        """
        from bridge.core.client.messages import MessageAnswer, MessageTarget, message_request, read_message

        members = self._members
        if form.places:
            if any(member.remote.agent is not None for member in members.filling):
                text = "agents of one world go elsewhere together, and these slots by themselves"
                raise SettingError(f"{text}: a message {form.name} is for make_parallel_remote, or for other slots")
            chosen = self._lanes_of(range(len(members.at)) if slots is None else slots)
            if any(member.episode in STEPPED for member in chosen):
                text = f"a message {form.name} while answers to send are outstanding; take them by recv first"
                raise AlreadyPendingError(text, "recv")
            others = not self.pool.started and sum(map(len, chosen.values())) < len(members.at)
            if others:
                raise ResetNeededError(f"expected reset() before a message {form.name} to some of the slots")

        def target_of(member: Member, lanes: list[int]) -> MessageTarget:
            return MessageTarget(member.remote.url, tuple(member.start + lane for lane in lanes), tuple(lanes))

        def make(member: Member, lanes: list[int]) -> pb.EnvironmentRequest:
            return message_request(form, write, target_of(member, lanes), member.remote.wanted)

        self._ask(f"message {form.name}", make, slots)
        question = self._wait_for_answers()
        answers = []
        for member, message in question.answers.items():
            if message.WhichOneof("payload") == "error":  # it is the question's `failure`, or came after that
                continue
            lanes = question.lanes[member]
            data, step = read_message(form, message, member.remote.url)
            answers.append(MessageAnswer(target_of(member, lanes), data, step is not None))
            if step is not None:
                self.stepper.place(member, step, lanes)
        answers.sort(key=lambda answer: answer.target.slots)
        return answers, question.failure

    def splits_worlds(self, slots: Sequence[int]) -> bool:
        """Return True if `slots` contains only some of the lanes of a world."""
        return any(len(lanes) < member.lanes for member, lanes in self._lanes_of(slots).items())

    def read_property(self, key: str) -> list[tuple[Member, Any]]:
        """Read a property of every world; return each world's value, in the order of their slots."""
        with self.order:
            self.order.check(key)
            self._ask(key, lambda member, lanes: property_request(key))
            answers = self._wait_for_replies().answers
            return [(each, property_value(answers[each], each.remote.url, True)) for each in self._members.filling]

    def _ask(
        self,
        purpose: str,
        write: Callable[[Member, list[int]], pb.EnvironmentRequest],
        slots: Sequence[int] | None = None,
    ) -> None:
        """Send a request to each world of some slots, or of all; `_wait_for_replies` waits for the answers."""
        asked = range(len(self._members.at)) if slots is None else slots
        lanes = self._lanes_of(asked)
        # A loss that has arrived is reported before anything is sent.
        self.pool.drain()
        # Check all worlds before asking one: otherwise some environments would be called although this raises.
        requests: list[tuple[Member, bytes]] = []
        for member, chosen in lanes.items():
            if member.link is not LinkState.JOINED:
                raise ConnectionLostError(
                    member.remote.url, f"no {purpose} while it is {member.state.name.lower()}: {member.error}"
                )
            requests.append((member, member.remote.write(write(member, chosen))))
        # Set this before sending: if an interrupt comes between two requests, the next call gives them up.
        self.pool.question = Question(purpose, asked, lanes, dict.fromkeys(lanes))
        for member, request in requests:
            member.remote.ask(request)

    def _wait_for_replies(self, timeout: float | None = None) -> Question:
        """Wait for all answers to the question; raise the first refusal or loss."""
        question = self._wait_for_answers(timeout)
        if question.failure is not None:
            raise question.failure
        return question

    def _wait_for_answers(self, timeout: float | None = None) -> Question:
        """Wait for all answers to the question. Remotes that do not answer within the pool's timeout are lost."""
        pool, question = self.pool, self.pool.question
        assert question is not None, "`order` permits a wait only after a question"
        seconds = pool.timeout if timeout is None else timeout
        # Wait even after a failure: remaining answers would be taken for answers to the next question.
        if not pool.gather(lambda: not question.missing, time.monotonic() + seconds):
            late, reason = list(question.missing), f"no answer to {question.purpose} within {seconds:g} s"
            # With a timeout given by the caller, the call stays pending, and the caller can wait again.
            if timeout is None:
                for member in late:
                    pool.lose(member, member.remote.give_up(RemoteTimeoutError(member.remote.url, reason)))
                pool.question = None
            raise RemoteTimeoutError(", ".join(member.remote.url for member in late), reason)
        pool.question = None
        return question

    def _lanes_of(self, slots: Sequence[int]) -> dict[Member, list[int]]:
        """Return the lanes of each member that are among some slots."""
        at = self._members.at
        lanes: dict[Member, list[int]] = {}
        for slot in sorted(set(slots)):
            if not 0 <= slot < len(at):
                raise SettingError(f"expected slots from 0 to {len(at) - 1}, got {slot!r}")
            member = at[slot]
            lanes.setdefault(member, []).append(slot - member.start)
        return lanes


def _flat_report(reports: Sequence[RemoteReport], states: Array, stalled: float) -> dict[str, float]:
    """Return the result of `RemoteVectorEnv.report`.

    Args:
        reports: The report on each remote.
        states: The state of each slot, as `slot_states` returns it.
        stalled: Seconds for which calls waited for lost slots.
    """
    found = {f"slots/{state.name.lower()}": float(np.count_nonzero(states == state)) for state in SlotState}
    found["stalled_seconds"] = stalled
    for name in COUNTS:
        key = "episodes_cut" if name == "episodes_lost" else name
        found[key] = float(sum(getattr(report, name) for report in reports))
    for report in reports:
        _add_server(found, report.url, slots=len(report.slots))
        # Include lost servers whose slots have moved away.
        for url, (losses, seconds) in report.by_server.items():
            _add_server(found, url, losses=losses, seconds_away=seconds)
    return found


def _add_server(found: dict[str, float], url: str, **numbers: float) -> None:
    """Add numbers of one remote to a server's entries in a report."""
    for name in ("slots", "losses", "seconds_away"):
        key = f"servers/{url}/{name}"
        found[key] = found.get(key, 0.0) + float(numbers.get(name, 0.0))
