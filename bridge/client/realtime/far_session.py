"""The protocol state of a stream whose Steps are in flight, where its world is a real-time one that is far away."""

from __future__ import annotations

from collections.abc import Mapping

from bridge.client.realtime.answer_buffer import AnswerBuffer
from bridge.client.world.events import Event, Lost, Refused, StepAnswered
from bridge.client.world.joined_world import JoinedWorld
from bridge.client.world.session import ENDED_CODES, Answer, ClientSession, ClientState, RequestKind, Trigger
from bridge.encoding.tensors import pack_tensor, unpack_tensor
from bridge.errors import RemoteError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["FarSession"]

# What answers raise that lack something, or say what is not possible.
_UNREADABLE = (KeyError, IndexError, OverflowError, TensorError, TypeError, ValueError)


class FarSession(ClientSession):
    """A `ClientSession` that keeps Steps in flight where `JoinedWorld.answers` says so; else it is a plain one.

    The server holds each Step until there is a new frame. The `AnswerBuffer` keeps the answers; `due` gives them out.
    """

    @property
    def answers(self) -> AnswerBuffer | None:
        """The results of Steps in flight; None: each Step waits for its own answer."""
        return None if self.world is None else self.world.answers

    def begin(self, settings: Mapping[str, pb.Tensor] | None, now: float, *, reset: bool = True) -> None:
        """Do as `ClientSession.begin`.

        A single environment enters a new episode only by a Reset, so that one is sent that restarts nothing. Lanes
        enter theirs by themselves: nothing is sent, for the answer has come, or is on its way.
        """
        answers = self.answers
        if answers is not None and not reset:
            settings, reset = {"restart": pack_tensor(False)}, True
        goes_on = self.state is ClientState.RUNNING and settings is not None and "restart" in settings
        if answers is not None and answers.enters_by_itself and goes_on:
            self._move(Trigger.BEGIN)
            answers.asked = 1
        else:
            super().begin(settings, now, reset=reset)

    def _send_first_step(self, world: JoinedWorld, now: float) -> None:
        if world.answers is None:
            super()._send_first_step(world, now)
            return
        mask = self._settings.get("reset_mask")
        world.answers.begin(self._episode, None if mask is None else unpack_tensor(mask, "reset_mask"))
        self._send_ahead(world, world.answers, now, 1)
        self.ask_ahead(now)

    def ask_ahead(self, now: float) -> None:
        """Ask for what Steps in flight bring; `due` gives it, or the next answer."""
        world = self._require_world()
        if world.answers is not None:
            world.answers.asked += 1
            self._send_ahead(world, world.answers, now, world.answers.may_send)

    def _send_ahead(self, world: JoinedWorld, answers: AnswerBuffer, now: float, count: int) -> None:
        for _ in range(count):
            self._send(RequestKind.HELD, world.first_step, now)
        answers.in_flight += count

    def abandon_episode(self) -> None:
        """Drop also what Steps in flight have brought."""
        super().abandon_episode()
        if self.answers is not None:
            self.answers.begin(self._episode)

    def due(self, now: float) -> StepAnswered | Refused | Lost | None:
        """Return what there is for a call that waits for what Steps in flight bring; None: it has to wait."""
        world = self._require_world()
        try:
            repeats = self.state is ClientState.RUNNING
            found = None if world.answers is None else world.answers.take(now, repeats=repeats)
        except _UNREADABLE as problem:
            return self._break(f"its answers cannot be read: {problem}")
        if isinstance(found, RemoteError):
            self._move(Trigger.REFUSED)
            return Refused(found)
        if found is None or world.answers is None:
            return None
        answered = self._step_answered(world, found, found.step.state)
        # A caller waits already for the next episode, as in a rollout.
        if self.state is ClientState.ENDED and (asked := world.answers.asked):
            self.begin(None, now, reset=False)
            world.answers.asked = asked
        return answered

    def _on_held(self, answer: Answer) -> Event | None:
        world, (request, message, error, now) = self._require_world(), answer
        answers = world.answers
        if answers is None or (error is None and message.WhichOneof("payload") != "step"):
            return self._break("it answered a Step by something else")
        answers.in_flight -= 1
        current = request.number == self._episode
        if error is not None:
            if error.code in ENDED_CODES and current:
                return self.connection_lost(error)
            if current:
                answers.push_error(error)
            return self.due(now)
        try:
            if not answers.push(message, request.number, request.sent, now):
                self.stale += 1
                world.dropped()
        except _UNREADABLE as problem:
            return self._break(f"its answer cannot be read: {problem}")
        self._send_ahead(world, answers, now, answers.may_send)
        return self.due(now)
