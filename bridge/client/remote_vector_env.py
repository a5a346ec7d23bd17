"""Many remotes as one `gymnasium.vector.VectorEnv`, which waits for none that is resetting."""

from __future__ import annotations

import copy
import dataclasses
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from bridge.client.conflict import ConflictDetector
from bridge.client.connect import Transport, checked_transport
from bridge.client.infos import lane_info, merge_lanes
from bridge.client.members import SPARE, Member, MemberVectorEnv, Results
from bridge.client.poller import Poller
from bridge.client.realtime import merge_latency
from bridge.client.reconnect import RemoteReport
from bridge.client.remote import Delivery, Remote, SlotState, close_remotes, reset_settings
from bridge.client.remote_env import (
    MAX_MESSAGE_BYTES,
    TIMEOUT,
    Role,
    Wait,
    call_results,
    checked_timeout,
    given_options,
    is_perlert,
    refuse_unknown_keywords,
    remote_metadata,
    remote_spec,
)
from bridge.client.send_recv import Received, receive, send
from bridge.client.session import ENDED_CODES, Lost, Replied, property_value
from bridge.client.step_reader import Batch
from bridge.client.world_request import WorldRequest
from bridge.credentials import ClientCredentials, Pem, TokenLike
from bridge.errors import (
    AlreadyPendingError,
    ClosedError,
    Code,
    ConnectionLostError,
    EnvironmentFailedError,
    NothingPendingError,
    RefusedError,
    RemoteError,
    RemoteTimeoutError,
    ResetNeededError,
    SettingError,
)
from bridge.forks import forget_in_child
from bridge.logs import SafeLog
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.random_state import generator_of
from bridge.spaces import Layout
from bridge.tensors import Array, pack_tensor

__all__ = ["RemoteVectorEnv", "make_vec_remote"]

# Seconds that `step` and `reset` wait where no slot has an observation: a loop over them does not spin.
_PACE = 0.02
_RESET_ATTEMPTS = 3

VECTOR_ENTRY_POINT = "bridge.wrappers.blocking_reset:make_blocking"

_log = SafeLog(__name__)


@dataclasses.dataclass
class _Calls:
    """Requests for a property or a call that are outstanding."""

    purpose: str
    missing: dict[int, Member]
    """Those that have not answered, by their first slot."""
    answers: dict[int, pb.EnvironmentResponse] = dataclasses.field(default_factory=dict)
    """What came, by the first slot."""
    failure: RemoteError | None = None
    """The first refusal, or loss."""


class _Turn(AbstractContextManager[None]):
    """A call of a vector environment, during which there may be no other."""

    def __init__(self, envs: RemoteVectorEnv, call: str, pending: str | None) -> None:
        self._envs, self._call, self._pending = envs, call, pending

    def __enter__(self) -> None:
        self._envs.take_turn(self._call, self._pending)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._envs.end_turn()


class _Gathering(_Turn):
    """One that takes the answers of an asynchronous call."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._envs.gathered(error)
        self._envs.end_turn()


class RemoteVectorEnv(MemberVectorEnv):
    """A vector of remote environments, in the semantics of OpenAI Universe under Gymnasium's contract.

    Observations are a tuple with an entry a slot: an observation of `single_observation_space`, or None for a slot
    that is connecting, resetting or lost. `reset` returns at once. A slot whose episode ended begins its next one by
    itself in the following `step`; until its observation is there it reads None, with reward 0, both flags False, and
    its action not applied. Slots that run are not held up by it. `bridge.wrappers.BlockingReset` waits for every slot
    and gives batched arrays.

    A remote that is lost ends its episode with `truncated=True` once, `infos["error"]` says why, and is connected
    again with growing pauses; the other slots go on.

    Infos are Gymnasium's dict of arrays with `_key` masks, and besides `n`, a tuple of each slot's own info (U-7), and
    `slot_state`, an int64 array of `SlotState`.

    Args:
        urls: A server's URL for each world; or one URL, of which as many worlds are made as `num_envs` asks for. A
        world of N lanes
            fills N slots.
        num_envs: The number of slots; None: what the URLs give, a world each.
        env_id: The environment, where a server has several.
        env_kwargs: For the environment's constructor.
        render_mode: The render mode to make it with.
        timeout: Seconds to wait for any answer.
        max_message_bytes: The largest request or answer, in bytes.
        transport: What to speak gRPC with: `http2`, our own HTTP/2, which is faster; or `grpcio`, the library, for
            proxies and servers that our own does not get along with.
        token: What the server wants to see; None: that of `token_file`, or else of the environment variable
            `BRIDGE_TOKEN`.
        token_file: A file that holds the token.
        tls_ca: For `grpcs://`: the authorities of the server's certificate, the path or the bytes of a
            PEM file; None: those of the system.
        tls_certificate: For a server that asks for one: the client's certificate, PEM.
        tls_key: The key of `tls_certificate`, PEM.
        env: A function that makes the environment: sent to the server, which executes it if it was started with
            `allow_env_factories=True`. `env_kwargs` are its arguments.
        spares: URLs of further servers, whose worlds stand ready and take over the slots of remotes that are lost.
            Where there are more `urls` than `num_envs`, those beyond are spares too.
        role: In a real-time world: `player`, or `spectator`, whose actions and resets change nothing.
        wait: In a real-time world: `now`, or `next_frame`, for one decision a frame.
        diagnostics: In a real-time world: whether infos carry `latency` (U-11).

    Raises:
        AddressError: A URL cannot be read.
        ConnectError: Nobody listens at one of them.
        RefusedError: A server has no such environment, or not with these arguments.
        SettingError: The worlds differ in their spaces, or do not add up to `num_envs`.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        num_envs: int | None = None,
        env_id: str | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        render_mode: str | None = None,
        timeout: float = TIMEOUT,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        transport: Transport = "http2",
        token: TokenLike | None = None,
        token_file: str | os.PathLike[str] | None = None,
        tls_ca: Pem | None = None,
        tls_certificate: Pem | None = None,
        tls_key: Pem | None = None,
        env: Callable[..., Any] | None = None,
        spares: str | Sequence[str] = (),
        role: Role | None = None,
        wait: Wait | None = None,
        diagnostics: bool = True,
    ) -> None:
        self.closed = False
        self._members: list[Member] = []
        self._spares: list[Member] = []
        self._conflicts = ConflictDetector("vector environment")
        self._timeout = checked_timeout(timeout)
        self._max_message_bytes = max_message_bytes
        self._transport = checked_transport(transport)
        self._poller: Poller[Delivery] = Poller()
        self._member_of: dict[Remote, Member] = {}
        self._pending: str | None = None
        self._timed_out = False
        self._question: _Calls | None = None
        self._was_reset = False
        self._sent = False
        """Whether answers to `send` may be outstanding."""
        self._all_running = False
        self._has_errors = False
        """Whether a member may have an error."""
        self._polled_at = time.monotonic()
        """When it was last seen what has come."""
        self._waits_for_lanes = False
        self.pacer: Callable[[], None] | None = None
        """Called in each step between the sending of actions and the request for what came of them."""
        self._jitter = random.Random()
        credentials = ClientCredentials.of(
            token=token, token_file=token_file, tls_ca=tls_ca, tls_certificate=tls_certificate, tls_key=tls_key
        )
        place = {"role": role, "wait": wait}

        def request_for(url: str) -> WorldRequest:
            return WorldRequest.of(
                url, env_id, render_mode, env_kwargs, None, place, diagnostics, credentials=credentials, env=env
            )

        requests = [request_for(url) for url in checked_urls(urls)]
        spares = [spares] if isinstance(spares, str) else list(spares)
        standing_by = [request_for(url) for url in spares]
        if isinstance(num_envs, int) and 0 < num_envs < len(requests):
            requests, standing_by = requests[:num_envs], requests[num_envs:] + standing_by
        try:
            self._connect_all(requests, num_envs)
            for world_request in standing_by:
                self._add_spare(world_request)
        except BaseException:
            self._close_members(0.5)
            raise
        world_info = self._world_info()
        self._member_at = [member for member in self._members for _ in range(member.lanes)]
        self.num_envs = sum(member.lanes for member in self._members)
        self.single_observation_space: Space[Any] = world_info.observation_space
        self.single_action_space: Space[Any] = world_info.action_space
        self.observation_space = batch_space(world_info.observation_space, self.num_envs)
        self.action_space = batch_space(world_info.action_space, self.num_envs)
        self.metadata = {**remote_metadata(world_info), "autoreset_mode": AutoresetMode.NEXT_STEP}
        self.render_mode = render_mode or world_info.render_mode
        kwargs = {
            "env_id": env_id,
            "env_kwargs": env_kwargs,
            "timeout": timeout,
            "max_message_bytes": max_message_bytes,
            "transport": None if transport == "http2" else transport,
            **credentials.keywords(),
            "env": env,
            "spares": spares or None,
            **place,
            "diagnostics": None if diagnostics else False,
        }
        given = {key: value for key, value in kwargs.items() if value is not None}
        url_list = urls if isinstance(urls, str) else list(urls)
        self.spec: EnvSpec | None = remote_spec(
            None,
            {"urls": url_list, "num_envs": self.num_envs, **given},
            world_info,
            self.render_mode,
        )
        self.spec.vector_entry_point = VECTOR_ENTRY_POINT
        self.spec.kwargs["vectorization_mode"] = "vector_entry_point"
        self._observation_layout = Layout(world_info.observation_space, "observation")
        self._action_layout = Layout(world_info.action_space, "action")
        forget_in_child(self)

    # Copies and forked processes

    def __getstate__(self) -> dict[str, Any]:
        """What a copy needs: its remotes connect anew in its first `reset`."""
        own = ("_conflicts", "_poller", "_members", "_member_of", "_member_at", "_question", "_spares")
        state = {key: value for key, value in self.__dict__.items() if key not in own}
        everybody = (*self._members, *self._spares)
        return {**state, "_parts": [(member.remote.parts(), member.start, member.lanes) for member in everybody]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        parts = state.pop("_parts")
        self.__dict__.update(state)
        self._conflicts = ConflictDetector("vector environment")
        self._poller = Poller()
        everybody = [
            Member(Remote.of_parts(of, self._poller, self._transport, shared=self._shared), start, lanes)
            for of, start, lanes in parts
        ]
        self._members = [member for member in everybody if member.start != SPARE]
        self._spares = [member for member in everybody if member.start == SPARE]
        self._member_of = {member.remote: member for member in everybody}
        self._member_at = [member for member in self._members for _ in range(member.lanes)]
        self._sent, self._has_errors, self._all_running = False, True, False
        self._pending, self._timed_out, self._question, self._was_reset = None, False, None, False
        if self._waits_for_lanes:
            self.wait_for_lanes()
        forget_in_child(self)

    def after_fork(self) -> None:
        """Leave the connections to the parent process; the next `reset` makes some for this process."""
        self._conflicts = ConflictDetector("vector environment")
        self._poller = Poller()
        for member in (*self._members, *self._spares):
            member.remote.disown(self._poller)
        self._members = [Member(member.remote, member.start, member.lanes) for member in self._members]
        self._spares = [Member(spare.remote, SPARE, spare.lanes) for spare in self._spares]
        self._member_of = {member.remote: member for member in (*self._members, *self._spares)}
        self._member_at = [member for member in self._members for _ in range(member.lanes)]
        self._sent, self._has_errors, self._all_running = False, True, False
        self._pending, self._timed_out, self._question, self._was_reset = None, False, None, False

    # Connecting

    # The contract of VectorEnv

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Ask every slot for a new episode, and return at once.

        Args:
            seed: An integer seeds slot i with `seed + i`; a list gives each slot's.
            options: For the environments' reset; `reset_mask`, a bool array `(num_envs,)`, names the slots to reset,
                and the others stay as they are.

        Returns:
            A tuple with an observation, or None, for each slot; and the infos.
        """
        with self.exclusive("reset"):
            self.begin_reset(seed, options)
            return self._as_universe(self._results())[::4]  # what comes from here on, the first step gives

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Apply actions to the slots that are in an episode, and let those whose episode ended begin their next.

        Args:
            actions: A batch of `action_space`; entries of slots without an observation are not applied.

        Returns:
            A tuple with an observation, or None, for each slot; float64 rewards, bool terminations and truncations,
            each `(num_envs,)`; and the infos.

        Raises:
            InvalidActionError: An action is not in its space; nothing was sent.
            ResetNeededError: `reset` was never called (U-8).
        """
        self.step_async(actions)
        return self.step_wait()

    def reset_async(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Send what `reset` sends; `reset_wait` gathers."""
        with self.exclusive("reset"):
            self.begin_reset(seed, options)
            self._pending = "reset"

    def reset_wait(self) -> tuple[Any, dict[str, Any]]:
        """Return what has come since `reset_async`."""
        with self.exclusive("reset_wait", "reset"):
            self._pending = None
            self._drain()
            return self._as_universe(self._results())[::4]

    def step_async(self, actions: Any) -> None:
        """Send what `step` sends; `step_wait` gathers."""
        with self.exclusive("step"):
            self.begin_step(actions)
            self._pending = "step"

    def step_wait(self) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Wait for the slots that are in an episode, each within `timeout`, and return what has come."""
        with self.exclusive("step_wait", "step"):
            self._pending = None
            return self._as_universe(self.finish_step())

    def send(self, actions: Any, slots: Any = None) -> None:
        """Apply actions to some slots and return at once; `recv` takes the answers, whichever come first.

        So a straggler holds up nobody: step the slots that have answered, and leave the others to their time:

            envs = BlockingReset(make_vec_remote(urls))
            observations, infos = envs.reset(seed=0)
            envs.send(policy(observations))
            while training:
                slots, observations, *_ = envs.recv(at_least=48)
                envs.send(policy(observations), slots)

        A slot whose episode ended begins its next one instead (NEXT_STEP), as does one whose remote was lost, once it
        is back; the action is not applied then.

        Args:
            actions: A batch of as many actions as there are `slots`, in their order.
            slots: Slot numbers, each once; all lanes of a world side by side, as `recv` returns them. None: all slots.

        Raises:
            InvalidActionError: An action is not in its space; nothing was sent.
            AlreadyPendingError: A slot has an action already whose answer was not taken; nothing was sent.
            ResetNeededError: `reset` was never called.
        """
        with self.exclusive("send"):
            send(self, actions, slots)

    def recv(self, at_least: int = 1) -> Received:
        """Wait until at least this many slots have answered, and return all that have.

        Args:
            at_least: A number of slots, at most those that an answer is coming for.

        Returns:
            The slots, an int64 array `(k,)` in rising order; and for these k slots a batch of observations, float64
            rewards, bool terminations and truncations, each `(k,)`, and infos, arrays `(k,)` with `_key` masks. A slot
            whose remote was lost is truncated, with its last observation and `infos["error"]`.

        Raises:
            RemoteTimeoutError: Too few answered within `timeout` seconds; their answers stay for the next call.
            SettingError: Fewer answers are coming than `at_least`.
        """
        with self.exclusive("recv"):
            return receive(self, at_least)

    def exclusive(self, call: str, pending: str | None = None) -> AbstractContextManager[None]:
        """Keep other threads out, and refuse a call out of turn.

        Args:
            call: The method's name.
            pending: The asynchronous call that it must follow; None: none may be pending.
        """
        return _Turn(self, call, pending)

    def gathering(self, pending: str) -> AbstractContextManager[None]:
        """Gather what an asynchronous call asked for; after a timeout it stays pending, so `*_wait` can go on."""
        return _Gathering(self, f"{pending}_wait", pending)

    def take_turn(self, call: str, pending: str | None) -> None:
        """Do what `exclusive` begins with."""
        self._conflicts.__enter__()
        try:
            if self.closed:
                raise ClosedError(f"{call} on a closed vector environment; make a new one")
            if pending is None and self._pending is not None:
                if not self._timed_out or (call != "reset" and self._pending != "call"):
                    remedy = f"call {self._pending}_wait" + (" again, or reset" if self._timed_out else " first")
                    raise AlreadyPendingError(f"{call} while a {self._pending} is pending; {remedy}", self._pending)
                self._abandon()
            elif self._pending != pending:
                raise NothingPendingError(f"expected {pending}_async before {call}", str(pending))
        except BaseException:
            self.end_turn()
            raise

    def end_turn(self) -> None:
        """Let other threads in."""
        self._conflicts.__exit__(None, None, None)

    def gathered(self, error: BaseException | None) -> None:
        """Note how `gathering` ended."""
        self._timed_out = isinstance(error, RemoteTimeoutError)
        if not self._timed_out:
            self._pending = None

    def pend(self, call: str) -> None:
        """Note that an asynchronous call was begun."""
        self._pending = call

    def cancel(self) -> None:
        """Let a `reset` give up what is pending, without a wait for it."""
        self._timed_out = self._pending is not None

    def _abandon(self) -> None:
        """Give up a call that timed out: what still comes of it belongs to nothing any more."""
        if self._question is not None:
            for member in self._question.missing.values():
                member.remote.session.abandon_questions()
            self._question = None
        self._pending, self._timed_out = None, False

    def begin_reset(
        self,
        seed: int | Sequence[int | None] | None,
        options: Mapping[str, Any] | None,
        slot_options: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Check and send the Resets; what `reset_async` does without its bookkeeping.

        Args:
            seed: As for `reset`.
            options: As for `reset`; the dict stays as it is.
            slot_options: Further options of each slot's own.

        Raises:
            SettingError: Seeds or options that cannot be sent, or the lanes of one world were given different options.
        """
        seeds = spread_seeds(seed, self.num_envs)
        given = dict(options or {})
        mask = given.pop("reset_mask", None)
        if mask is not None:
            check_mask(mask, self.num_envs)
        self._all_running = False
        self._drain()
        plans: list[tuple[Member, Mapping[str, pb.Tensor]]] = []
        for member in self._members:
            chosen = None if mask is None or not self._was_reset else mask[member.slots]
            if chosen is not None and not chosen.any():
                if member.waiting:
                    raise AlreadyPendingError(
                        f"{member.remote.url} still owes the answer to a step that timed out; reset its slots too",
                        "step",
                    )
                continue
            part = seeds[member.slots]
            own = dict(slot_options[member.start]) if slot_options is not None else {}
            if slot_options is not None and any(dict(other) != own for other in slot_options[member.slots]):
                raise SettingError(
                    f"expected the same options for all {member.lanes} lanes of {member.remote.url}, which are reset "
                    f"by one call, got {list(slot_options[member.slots])}"
                )
            lane_mask = None if member.single or chosen is None or chosen.all() else chosen
            if member.waiting and lane_mask is not None:
                raise AlreadyPendingError(
                    f"{member.remote.url} still owes the answer to a step that timed out; reset all its lanes", "step"
                )
            options_here = member.remote.options({**given, **own} if options is not None or own else None)
            plans.append((member, reset_settings(part[0] if member.single else part, options_here, lane_mask)))
        for member, settings in plans:
            member.in_episode = False
            member.error = None
            if member.state in (SlotState.LOST, SlotState.CONNECTING):
                member.settings = settings
                member.retry_at = 0.0
            else:
                self._begin(member, settings)
        self._check_deadlines(time.monotonic())
        self._was_reset = True

    def begin_step(self, actions: Any) -> None:
        """Check and send the Steps; what `step_async` does without its bookkeeping."""
        if not self._was_reset:
            raise ResetNeededError("expected reset() before the first step()")
        if self._sent:
            if any(member.stepping for member in self._members):
                raise AlreadyPendingError("step while answers to send are outstanding; take them by recv first", "recv")
            self._sent = False
        columns = self._action_layout.split(actions, self.num_envs)
        if not self._all_running or time.monotonic() - self._polled_at > 1.0:
            self._drain()
        if self.pacer is not None:
            self._act(columns)
            self.pacer()
            self._drain()
        self.ask([(member, member.start) for member in self._members], columns)

    def ask(self, plan: list[tuple[Member, int]], columns: list[Any]) -> None:
        """Send the Steps of members, each with its actions' first row in `columns`; finished ones begin anew."""
        self._all_running = False
        now = time.monotonic()
        running = [item for item in plan if item[0].state is SlotState.RUNNING and item[0].answer is None]
        written = self._write_steps(running, columns)
        with self._poller.corked() if self._shared else nullcontext():
            for member, position in running:
                if member.ended:
                    self._begin(member, None, reset=False)
                    continue
                member.stepping = True
                member.remote.record.steps_asked += member.lanes
                member.remote.session.deadline = now + self._timeout
                if (request := written.get(position)) is not None:
                    member.remote.send_step(request)
                    continue
                acted = self.pacer is not None and member.remote.realtime is not None
                member.remote.step_columns(None if acted else columns, position)
        if len(running) < len(self._members) or self._spares or self._has_errors:
            self._check_deadlines(now)

    def _write_steps(self, plan: list[tuple[Member, int]], columns: list[Any]) -> dict[int, bytes]:
        """Write the Steps of all single environments that take the same form at once; return them by position."""
        alike: dict[Any, list[tuple[Member, int]]] = {}
        if len(plan) > 1:
            for item in plan:
                form = None if item[0].ended else item[0].remote.world.form
                if form is not None:
                    alike.setdefault(form, []).append(item)
        written: dict[int, bytes] = {}
        for items in alike.values():
            if len(items) > 1:
                positions = [position for _, position in items]
                requests = items[0][0].remote.world.write_steps(columns, positions)
                written.update(zip(positions, requests or (), strict=False))
        return written

    def _act(self, columns: list[Any]) -> None:
        """Send the actions to real-time worlds ahead of the Step that asks what came of them."""
        for member in self._members:
            if (
                member.remote.realtime is not None
                and member.state is SlotState.RUNNING
                and member.answer is None
                and not member.ended
            ):
                member.remote.act_columns(columns, member.start)

    def finish_step(self) -> Results:
        """Wait for every slot that was stepped; where none has an observation, wait a moment for one."""
        members = self._members
        first = 0

        def answered() -> bool:
            nonlocal first
            while (
                first < len(members) and not members[first].waiting
            ):  # who is not waiting now will not be in this step
                first += 1
            return first == len(members)

        self._gather(answered, time.monotonic() + self._timeout + 1.0)
        if not any(member.answer is not None for member in self._members):
            self._gather(lambda: any(member.answer is not None for member in self._members), time.monotonic() + _PACE)
        return self._results()

    def begin_next(self, ended: Array) -> None:
        """Begin the next episode of slots that ended, in this very step."""
        for member in self._members:
            chosen = ended[member.slots]
            if not chosen.any() or member.state is not SlotState.RUNNING:
                continue  # one that was cut off begins anew once its remote is back
            if member.single:
                self._begin(member, None, reset=False)
            else:
                settings = reset_settings(reset_mask=None if chosen.all() else chosen)
                if member.remote.realtime is not None:
                    settings["restart"] = pack_tensor(False)  # their next episodes run already
                self._begin(member, settings)

    def finish_all(self, timeout: float) -> Results:
        """Wait until every slot has an observation, but for those that are cut off in this very step.

        Raises:
            RemoteTimeoutError: Some have none after `timeout` seconds; it names their URLs.
            EnvironmentFailedError: A remote environment fails in every attempt to reset it.
        """

        members = self._members
        first = 0

        def enough() -> bool:
            nonlocal first
            if self._has_errors:
                self._raise_permanent_error()
                first = 0
            while first < len(members) and members[first].settled:
                first += 1
            return first == len(members)

        if not self._gather(enough, time.monotonic() + timeout):
            late = [member for member in self._members if not member.settled]
            reasons = "; ".join(
                f"{member.remote.url} is {member.state.name.lower()}"
                + (f" ({member.error.reason})" if member.error else "")
                for member in late
            )
            raise RemoteTimeoutError(
                ", ".join(dict.fromkeys(member.remote.url for member in late)),
                f"no observation within {timeout:g} s: {reasons}",
            )
        return self._results()

    def _raise_permanent_error(self) -> None:
        """Raise what no waiting mends: settings that are refused, an environment that fails in every reset."""
        for member in self._members:
            if member.state is SlotState.RESETTING and isinstance(member.error, RefusedError) and not member.in_episode:
                if member.error.code in ENDED_CODES:
                    continue  # another world was made since
                if isinstance(member.error, EnvironmentFailedError) and member.failures < _RESET_ATTEMPTS:
                    continue
                error, member.error, member.failures, member.settings = member.error, None, 0, None
                raise error
        self._has_errors = any(member.error is not None for member in self._members)

    # The forms of results

    def _as_universe(self, results: Results) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        rows = tuple(
            self._observation_layout.row(results.batch.columns, slot) if results.valid[slot] else None
            for slot in range(self.num_envs)
        )
        infos = self.merged_infos(results)
        infos["n"] = tuple(self.own_infos(results))
        infos["slot_state"] = self.slot_states
        if any(member.remote.record.away_since is not None for member in self._members):
            infos["seconds_away"] = self._seconds_away()
        batch = results.batch
        return rows, batch.rewards, batch.terminations, batch.truncations, infos

    def merged_infos(self, results: Results) -> dict[str, Any]:
        """Return the infos by Gymnasium's rules: arrays over the slots with `_key` masks."""
        if (
            len(self._members) == 1
            and results.infos
            and isinstance(results.infos[0][1], dict)
            and not self._members[0].single
        ):
            return results.infos[0][1]
        infos: dict[str, Any] = {}
        for slot, error in results.errors.items():
            infos = self._add_info(infos, {"error": str(error)}, slot)
        times: list[tuple[int, Any]] = []
        only_single = all(member.single for member, _ in results.infos)
        for member, info in results.infos:
            if not info:
                continue
            if member.single:
                if only_single and member.remote.realtime is not None and "latency" in info:
                    times.append((member.start, info["latency"]))
                    info = {key: value for key, value in info.items() if key != "latency"}
                infos = self._add_info(infos, info, member.start)
            elif isinstance(info, list):
                for lane, own in enumerate(info):
                    infos = self._add_info(infos, own, member.start + lane)
            else:
                merge_lanes(infos, info, member.start, member.lanes, self.num_envs)
        merge_latency(infos, times, self.num_envs)
        return infos

    def own_infos(self, results: Results) -> list[dict[str, Any]]:
        """Return each slot's own info."""
        own: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for member, info in results.infos:
            for lane in range(member.lanes):
                own[member.start + lane] = dict(info) if member.single else lane_info(info, lane)
        for slot, error in results.errors.items():
            own[slot]["error"] = str(error)
        return own

    def same_step_infos(self, stepped: Results, begun: Results, ended: Array) -> dict[str, Any]:
        """Return the infos of a step after which slots that ended began their next episodes at once."""
        infos: dict[str, Any] = {}
        last, first = self.own_infos(stepped), self.own_infos(begun)
        for slot in range(self.num_envs):
            if ended[slot]:
                final = self._observation_layout.row(stepped.batch.columns, slot)
                infos = self._add_info(infos, {"final_obs": final, "final_info": last[slot]}, slot)
            infos = self._add_info(infos, first[slot] if ended[slot] else last[slot], slot)
        return infos

    def take(self, results: Results, begun: Results, ended: Array) -> None:
        """Put the first observations of slots that ended in the place of their last ones."""
        for column, new in zip(results.batch.columns, begun.batch.columns, strict=True):
            if isinstance(column, np.ndarray):
                column[ended] = np.asarray(new)[ended]
            else:
                for slot in np.flatnonzero(ended):
                    column[slot] = new[slot]

    def fill_last(self, results: Results) -> None:
        """Give slots without a new observation the one that they had last: those cut off, and those not asked.

        Raises:
            ConnectionLostError: A slot never had one.
        """
        for member in self._members:
            if results.valid[member.start]:
                continue
            if member.last is None:
                raise ConnectionLostError(member.remote.url, f"it went before its first observation: {member.error}")
            last = Batch.empty(self._observation_layout, self.num_envs)
            member.remote.reader.read_into(member.last, last, member.start, member.remote.now())
            for column, old in zip(results.batch.columns, last.columns, strict=True):
                column[member.slots] = old[member.slots]

    def row(self, results: Results, slot: int) -> Any:
        """Return one slot's observation."""
        return self._observation_layout.row(results.batch.columns, slot)

    def batched(self, results: Results) -> Any:
        """Return the observations of all slots as Gymnasium batches them."""
        return self._observation_layout.batch(results.batch.columns)

    @property
    def slot_states(self) -> Array:
        """Where each slot is: an int64 array `(num_envs,)` of `SlotState`."""
        states = np.empty(self.num_envs, np.int64)
        for member in self._members:
            states[member.slots] = member.state
            if member.state is SlotState.RUNNING and member.remote.realtime is not None:
                resetting = member.remote.realtime.resetting
                if resetting is not None:
                    states[member.slots][resetting] = SlotState.RESETTING
        return states

    def _seconds_away(self) -> Array:
        now, away = time.monotonic(), np.zeros(self.num_envs)
        for member in self._members:
            since = member.remote.record.away_since
            away[member.slots] = 0.0 if since is None else now - since
        return away

    def remotes(self) -> tuple[RemoteReport, ...]:
        """Say how each remote is, spares last: which are away, since when and why, and what that has cost."""
        now = time.monotonic()
        return tuple(
            member.remote.record.report(
                now,
                member.remote.url,
                () if member.start == SPARE else tuple(range(member.start, member.start + member.lanes)),
                "spare" if member.start == SPARE and member.idle else member.state.name.lower(),
            )
            for member in (*self._members, *self._spares)
        )

    def wait_for_lanes(self) -> None:
        """Have real-time worlds of lanes answer only when every lane has an observation."""
        self._waits_for_lanes = True
        for member in self._members:
            member.remote.session.wait_for_all()

    @property
    def fps(self) -> float | None:
        """Frames a second of the real-time worlds, of the fastest where they differ; None: they wait for actions."""
        rates = [member.remote.info.fps for member in self._members if member.remote.info and member.remote.info.fps]
        return max(rates, default=None)

    @property
    def server_versions(self) -> tuple[str | None, ...]:
        """The version of each slot's server, None for one that is not ours (U-12)."""
        versions = [(member.lanes, member.remote.info) for member in self._members]
        return tuple(
            world_info.server_version if world_info else None for lanes, world_info in versions for _ in range(lanes)
        )

    def latency_summary(self) -> tuple[dict[str, Any], ...]:
        """Return for each remote `url`, and percentiles of `round_trip` and `observation_age` in seconds (U-11)."""
        return tuple(
            {"url": member.remote.url, **member.remote.realtime.latency.summary()}
            for member in self._members
            if member.remote.realtime is not None
        )

    @property
    def urls(self) -> tuple[str, ...]:
        """The URL of each slot's remote."""
        return tuple(member.remote.url for member in self._members for _ in range(member.lanes))

    # Calls

    def _ask(self, purpose: str, members: Sequence[Member], send: Callable[[Member], None]) -> None:
        """Send one request to each of some remotes; `_answers` waits for what they say."""
        self._drain()
        for member in members:
            if not member.remote.connected or member.state is SlotState.CONNECTING:
                raise ConnectionLostError(
                    member.remote.url, f"no {purpose} while it is {member.state.name.lower()}: {member.error}"
                )
        for member in members:
            send(member)
        self._question = _Calls(purpose, {member.start: member for member in members})

    def _answers(self, timeout: float | None = None) -> list[tuple[Member, pb.EnvironmentResponse]]:
        """Wait for all answers to the question; after the environment's own timeout those that are late are lost."""
        question = self._question
        if question is None:
            raise NothingPendingError("nothing was asked", "call")
        missing = question.missing
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        while missing:
            answer, source = self._next_answer(deadline)
            if source is None:
                error = self._late_answers(question, timeout)
                raise error
            if answer is None:
                continue
            if isinstance(answer, Replied):
                if missing.pop(source.start, None) is not None:
                    question.answers[source.start] = answer.message
                question.failure = question.failure or answer.error
                continue
            self._handle(answer, source)
            if isinstance(answer, Lost) and missing.pop(source.start, None) is not None:
                question.failure = question.failure or answer.error
        self._question = None
        if question.failure is not None:
            raise question.failure
        return [
            (member, question.answers[member.start]) for member in self._members if member.start in question.answers
        ]

    def _late_answers(self, question: _Calls, timeout: float | None) -> RemoteTimeoutError:
        late = list(question.missing.values())
        urls = ", ".join(member.remote.url for member in late)
        if timeout is not None:
            return RemoteTimeoutError(urls, f"no answer to {question.purpose} within {timeout:g} s")
        reason = f"no answer to {question.purpose} within {self._timeout:g} s"
        for member in late:
            self._lose(member, member.remote.give_up(RemoteTimeoutError(member.remote.url, reason)))
        self._question = None
        return RemoteTimeoutError(urls, reason)

    def _ask_all(self, send: Callable[[Member], None], purpose: str) -> list[tuple[Member, pb.EnvironmentResponse]]:
        """Send one request to every remote and wait for all answers."""
        with self.exclusive(purpose):
            self._ask(purpose, self._members, send)
            return self._answers()

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a public method of every environment, or read a public attribute; return a result a slot.

        Raises:
            RefusedError: A server has no method calls, or the name is private.
        """
        if name == "render" and not args and not kwargs:
            return self.render()
        answers = self._ask_all(lambda member: member.remote.call(name, args, kwargs), f"call of {name}")
        return tuple(result for member, message in answers for result in call_results(message, member.remote.url))

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Send what `call` sends; `call_wait` gathers."""
        with self.exclusive("call"):
            self._ask(f"call of {name}", self._members, lambda member: member.remote.call(name, args, kwargs))
            self._pending = "call"

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Return the results of `call_async`, one a slot.

        Args:
            timeout: Seconds; after them the call stays pending, and `call_wait` can be called again. Any other call
                gives it up, and its late answers are dropped. None: the environment's own timeout, after which remotes
                that have not answered are lost.

        Raises:
            RemoteTimeoutError: Some have not answered; it names their URLs.
            NothingPendingError: There was no `call_async`.
        """
        with self.gathering("call"):
            try:
                answers = self._answers(timeout)
            except RemoteTimeoutError:
                if self._question is None:
                    self._pending = None
                raise
            return tuple(result for member, message in answers for result in call_results(message, member.remote.url))

    def call_at(self, slots: Sequence[int], name: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a public method in some slots alone, or read a public attribute; results in the order of `slots`.

        Raises:
            SettingError: A slot is out of range.
            RefusedError: As `call`; or the lanes of a world can only be called all together.
        """
        lanes = self._lanes_of(slots)
        with self.exclusive(f"call of {name}"):
            self._ask(
                f"call of {name}",
                [member for member in self._members if member.start in lanes],
                lambda member: member.remote.call(
                    name, args, kwargs, () if len(lanes[member.start]) == member.lanes else lanes[member.start]
                ),
            )
            answers = self._answers()
        found: dict[int, Any] = {}
        for member, message in answers:
            for lane, result in zip(lanes[member.start], call_results(message, member.remote.url), strict=True):
                found[member.start + lane] = result
        return tuple(found[slot] for slot in slots)

    def _lanes_of(self, slots: Sequence[int]) -> dict[int, list[int]]:
        """Return the lanes of each member, by its first slot, that are among some slots."""
        for slot in slots:
            if not 0 <= slot < self.num_envs:
                raise SettingError(f"expected slots from 0 to {self.num_envs - 1}, got {slot!r}")
        chosen = set(slots)
        lanes = {
            member.start: [lane for lane in range(member.lanes) if member.start + lane in chosen]
            for member in self._members
        }
        return {start: found for start, found in lanes.items() if found}

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Read a public attribute of every environment; the spaces and generators as copies."""
        if name in ("observation_space", "action_space"):
            space = self.single_observation_space if name == "observation_space" else self.single_action_space
            return tuple(copy.deepcopy(space) for _ in range(self.num_envs))
        if name == "np_random":
            return self.np_random
        try:
            return self.call(name)
        except RefusedError as error:
            if error.code == Code.NOT_FOUND:  # as Gymnasium's own vector environments raise
                raise AttributeError(f"the environments have no attribute {name!r}: {error}") from error
            raise

    def set_attr(self, name: str, values: Any) -> None:
        """Set a public attribute: a list or tuple gives each slot's value, anything else that of all."""
        items = list(values) if isinstance(values, (list, tuple)) else [values] * self.num_envs
        if len(items) != self.num_envs:
            raise SettingError(f"expected {self.num_envs} values, one for each slot, got {len(items)}")
        self._ask_all(
            lambda member: member.remote.write_property(f"world.attributes.{name}", items[member.slots]),
            f"setting of {name}",
        )

    def set_attr_at(self, slots: Sequence[int], name: str, value: Any) -> None:
        """Set a public attribute of some slots to one value; the other lanes of their worlds keep theirs."""
        lanes = self._lanes_of(slots)
        partial = any(len(lanes[member.start]) < member.lanes for member in self._members if member.start in lanes)
        before = self.get_attr(name) if partial else (None,) * self.num_envs
        items = [value if slot in set(slots) else before[slot] for slot in range(self.num_envs)]
        with self.exclusive(f"setting of {name}"):
            self._ask(
                f"setting of {name}",
                [member for member in self._members if member.start in lanes],
                lambda member: member.remote.write_property(f"world.attributes.{name}", items[member.slots]),
            )
            self._answers()

    def wrapper_classes(self) -> tuple[list[str], ...]:
        """Return the classes of each slot's wrappers as `module:name`, base classes too; none where nobody can tell."""
        try:
            answers = self._ask_all(lambda member: member.remote.read_property("world.wrappers"), "world.wrappers")
        except RefusedError:
            return ([],) * self.num_envs
        names = [(member, property_value(message, member.remote.url, True)) for member, message in answers]
        return tuple(found for member, found in names for _ in range(member.lanes))

    def _read_property(self, key: str) -> list[Any]:
        """Read a property that has a value for each lane; return one for each slot."""
        answers = self._ask_all(lambda member: member.remote.read_property(key), key)
        found: list[Any] = []
        for member, message in answers:
            found.extend(property_value(message, member.remote.url, True))
        return found

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """A generator for each slot in the very state of its environment's: a copy, whose draws the remote's keep."""
        return tuple(generator_of(state) for state in self._read_property("world.random"))

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of each slot's environment."""
        return tuple(state["seed"] for state in self._read_property("world.random"))

    def render(self) -> tuple[Any, ...]:
        """Return the frame of every slot, as its environment's render mode gives it."""
        return tuple(self._read_property("world.frame"))

    def close_extras(self, **kwargs: Any) -> None:
        """Leave the worlds and disconnect; worlds that were made for this environment go."""
        with self._conflicts:
            self._close_members(2.0)

    def _close_members(self, timeout: float) -> None:
        close_remotes([member.remote for member in (*self._members, *self._spares)], timeout)

    def __del__(self) -> None:
        if "_poller" in self.__dict__ and not self.closed:  # else __init__ was never called, or raised early
            self._close_members(0.0)


def checked_urls(urls: Any) -> list[str]:
    """Return the URLs as a list, or raise SettingError where they are none."""
    found = [urls] if isinstance(urls, str) else list(urls)
    if not found:
        raise SettingError("expected a URL, or a list of them with at least one, got an empty list")
    return found


def spread_seeds(seed: Any, num_envs: int) -> list[int | None]:
    """Return a seed, or None, for each slot, by Gymnasium's rules."""
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, (int, np.integer)):
        return [int(seed) + slot for slot in range(num_envs)]
    seeds = list(seed)
    if len(seeds) != num_envs:
        raise SettingError(f"expected one seed for each of the {num_envs} slots, got {len(seeds)}")
    return seeds


def check_mask(mask: Any, num_envs: int) -> None:
    """Check a reset mask as Gymnasium's vector environments do."""
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"expected options['reset_mask'] to be a NumPy array, got {type(mask).__name__}")
    if mask.shape != (num_envs,):
        raise SettingError(f"expected options['reset_mask'] to have the shape ({num_envs},), got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"expected options['reset_mask'] to be of bools, got {mask.dtype}")
    if not mask.any():
        raise SettingError(f"expected options['reset_mask'] to hold a True, got {mask}")


def make_vec_remote(
    urls: str | Sequence[str],
    *,
    num_envs: int | None = None,
    env_id: str | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    render_mode: str | None = None,
    timeout: float = TIMEOUT,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    transport: Transport = "http2",
    token: TokenLike | None = None,
    token_file: str | os.PathLike[str] | None = None,
    tls_ca: Pem | None = None,
    tls_certificate: Pem | None = None,
    tls_key: Pem | None = None,
    env: Callable[..., Any] | None = None,
    spares: str | Sequence[str] = (),
    role: Role | None = None,
    wait: Wait | None = None,
    diagnostics: bool = True,
    **perlert: Any,
) -> RemoteVectorEnv:
    """Connect to many remote environments as one vector environment.

    Example:
        >>> from bridge import make_vec_remote, serve_gym
        >>> from bridge.wrappers import BlockingReset
        >>> with serve_gym("CartPole-v1") as server:
        ...     envs = BlockingReset(make_vec_remote(server.url, num_envs=3))
        ...     observations, infos = envs.reset(seed=0)
        ...     envs.close()
        >>> observations.shape
        (3, 4)

    Args:
        urls: A URL for each world, or one URL of which `num_envs` slots are made. `perlert://` URLs are a slot each and
            do not mix with others; they give a `bridge.perlert.PerlertVectorEnv`.
        num_envs: This and the other keywords are those of `RemoteVectorEnv`.
        env_id: As for `RemoteVectorEnv`.
        env_kwargs: As for `RemoteVectorEnv`.
        render_mode: As for `RemoteVectorEnv`.
        timeout: As for `RemoteVectorEnv`.
        max_message_bytes: As for `RemoteVectorEnv`.
        transport: As for `RemoteVectorEnv`.
        token: As for `RemoteVectorEnv`.
        token_file: As for `RemoteVectorEnv`.
        tls_ca: As for `RemoteVectorEnv`.
        tls_certificate: As for `RemoteVectorEnv`.
        tls_key: As for `RemoteVectorEnv`.
        env: As for `RemoteVectorEnv`.
        spares: As for `RemoteVectorEnv`.
        role: As for `RemoteVectorEnv`.
        wait: As for `RemoteVectorEnv`.
        diagnostics: As for `RemoteVectorEnv`.
        perlert: Of `perlert://` URLs alone: the keywords of `bridge.perlert.PerlertVectorEnv`.

    Raises:
        AddressError, ConnectError, RefusedError, RemoteTimeoutError, SettingError: As `RemoteVectorEnv`.
        TypeError: There is no such keyword.
    """
    options = {key: value for key, value in locals().items() if key not in ("urls", "perlert")}
    kinds = {is_perlert(url) for url in checked_urls(urls)}
    if len(kinds) > 1:
        raise SettingError(f"expected perlert:// URLs alone or none of them, got a mixture: {urls!r:.200}")
    if kinds == {True}:
        from bridge.perlert import PerlertVectorEnv

        # The declared type is that of every other URL; PerlertVectorEnv is this one's.
        given = given_options(make_vec_remote, options)
        return PerlertVectorEnv(urls, **given, **perlert)  # type: ignore[return-value]
    refuse_unknown_keywords("make_vec_remote", perlert)
    return RemoteVectorEnv(urls, **options)
