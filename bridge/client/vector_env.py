"""Many remotes as one `gymnasium.vector.VectorEnv`, which waits for none that is resetting."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from bridge.client.conflict import ConflictDetector
from bridge.client.connect import Transport, checked_transport
from bridge.client.env import (
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
from bridge.client.members import SPARE, Member
from bridge.client.pool import Pool
from bridge.client.reconnect import RemoteReport
from bridge.client.remote import SlotState
from bridge.client.results import Results
from bridge.client.session import property_value
from bridge.client.stepper import Received, Stepper
from bridge.client.world_request import WorldInfo, WorldRequest
from bridge.encoding.random_state import generator_of
from bridge.encoding.spaces import Layout
from bridge.encoding.tensors import Array
from bridge.errors import (
    AlreadyPendingError,
    ClosedError,
    Code,
    NothingPendingError,
    RefusedError,
    RemoteTimeoutError,
    SettingError,
)
from bridge.forks import forget_in_child
from bridge.logs import SafeLog
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.transport.credentials import ClientCredentials, Pem, TokenLike

__all__ = ["RemoteVectorEnv", "make_vec_remote"]

# Seconds that `step` and `reset` wait where no slot has an observation: a loop over them does not spin.
_PACE = 0.02
_RESET_ATTEMPTS = 3

VECTOR_ENTRY_POINT = "bridge.wrappers.blocking_reset:make_blocking"

_log = SafeLog(__name__)


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


class RemoteVectorEnv(VectorEnv[Any, Any, Array]):
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
        agent: In a world of several agents, which of them each URL is joined as; with one URL and a list, a slot for
            each agent of that list. The URLs name a world that exists, `?world=NAME`. None: the first that is free.
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
        agent: str | Sequence[str] | None = None,
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
        self._begin_anew()
        self.pool = Pool(checked_timeout(timeout), max_message_bytes, checked_transport(transport))
        """What waits for the remotes."""
        credentials = ClientCredentials.of(
            token=token, token_file=token_file, tls_ca=tls_ca, tls_certificate=tls_certificate, tls_key=tls_key
        )
        place = {"role": role, "wait": wait}

        def request_for(url: str, agent: str | None = None) -> WorldRequest:
            return WorldRequest.of(
                url, env_id, render_mode, env_kwargs, agent, place, diagnostics, credentials=credentials, env=env
            )

        requests = [request_for(url, name) for url, name in with_agents(checked_urls(urls), agent)]
        spares = [spares] if isinstance(spares, str) else list(spares)
        world_info = self._connect(requests, [request_for(url) for url in spares], num_envs)
        self.metadata = {**remote_metadata(world_info), "autoreset_mode": AutoresetMode.NEXT_STEP}
        self.render_mode = render_mode or world_info.render_mode
        kwargs = {
            "urls": urls if isinstance(urls, str) else list(urls),
            "num_envs": self.num_envs,
            "env_id": env_id,
            "env_kwargs": env_kwargs,
            "agent": agent if agent is None or isinstance(agent, str) else list(agent),
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
        self.spec: EnvSpec | None = remote_spec(None, given, world_info, self.render_mode)
        self.spec.vector_entry_point = VECTOR_ENTRY_POINT
        self.spec.kwargs["vectorization_mode"] = "vector_entry_point"
        forget_in_child(self)

    def _connect(
        self, requests: list[WorldRequest], standing_by: list[WorldRequest], num_envs: int | None
    ) -> WorldInfo:
        """Join the worlds, and learn their spaces."""
        if isinstance(num_envs, int) and 0 < num_envs < len(requests):
            requests, standing_by = requests[:num_envs], requests[num_envs:] + standing_by
        try:
            self.pool.connect_all(requests, num_envs)
            for world_request in standing_by:
                self.pool.add_spare(world_request)
        except BaseException:
            self.pool.close(0.5)
            raise
        world_info = self.pool.world_info()
        self.num_envs = self.pool.num_envs
        self.single_observation_space: Space[Any] = world_info.observation_space
        self.single_action_space: Space[Any] = world_info.action_space
        self.observation_space = batch_space(world_info.observation_space, self.num_envs)
        self.action_space = batch_space(world_info.action_space, self.num_envs)
        observation_layout = Layout(world_info.observation_space, "observation")
        self.stepper = Stepper(self.pool, observation_layout, Layout(world_info.action_space, "action"))
        """What steps the slots."""
        return world_info

    # Copies and forked processes

    def __getstate__(self) -> dict[str, Any]:
        """What a copy needs: its remotes connect anew in its first `reset`."""
        return {key: value for key, value in self.__dict__.items() if key != "_conflicts"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.stepper.begin_anew()
        self._begin_anew()
        forget_in_child(self)

    def after_fork(self) -> None:
        """Leave the connections to the parent process; the next `reset` makes some for this process."""
        self.pool.after_fork()
        self.stepper.begin_anew()
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Have nothing pending, and no episodes."""
        self._conflicts = ConflictDetector("vector environment")
        self._pending: str | None = None
        """The asynchronous call that was begun: `reset`, `step` or `call`."""
        self._timed_out = False
        """Whether a wait for it timed out."""

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
            return self._as_universe(self.stepper.take_results())[::4]  # what comes from here on, the first step gives

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
            self.pool.drain()
            return self._as_universe(self.stepper.take_results())[::4]

    def step_async(self, actions: Any) -> None:
        """Send what `step` sends; `step_wait` gathers."""
        with self.exclusive("step"):
            self.stepper.begin_step(actions)
            self._pending = "step"

    def step_wait(self) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Wait for the slots that are in an episode, each within `timeout`, and return what has come."""
        with self.exclusive("step_wait", "step"):
            self._pending = None
            return self._as_universe(self.stepper.finish_step())

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
            self.stepper.send(actions, slots)

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
            return self.stepper.recv(at_least)

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
        self.pool.abandon_question()
        self._pending, self._timed_out = None, False

    def begin_reset(
        self,
        seed: int | Sequence[int | None] | None,
        options: Mapping[str, Any] | None,
        slot_options: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Check and send the Resets, as `Stepper.begin_reset`."""
        self.stepper.begin_reset(seed, options, slot_options)

    @property
    def pacer(self) -> Callable[[], None] | None:
        """Called in each step between the sending of actions and the request for what came of them."""
        return self.stepper.pacer

    @pacer.setter
    def pacer(self, pacer: Callable[[], None] | None) -> None:
        self.stepper.pacer = pacer

    # The forms of results

    def merged_infos(self, results: Results) -> dict[str, Any]:
        """Return the infos by Gymnasium's rules: arrays over the slots with `_key` masks."""
        return results.merged_infos()

    def _as_universe(self, results: Results) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        rows = tuple(results.row(slot) if results.valid[slot] else None for slot in range(self.num_envs))
        infos = self.merged_infos(results)
        infos["n"] = tuple(results.own_infos())
        infos["slot_state"] = self.slot_states
        if any(member.remote.record.away_since is not None for member in self.pool.members):
            infos["seconds_away"] = self._seconds_away()
        batch = results.batch
        return rows, batch.rewards, batch.terminations, batch.truncations, infos

    @property
    def slot_states(self) -> Array:
        """Where each slot is: an int64 array `(num_envs,)` of `SlotState`."""
        states = np.empty(self.num_envs, np.int64)
        for member in self.pool.members:
            states[member.slots] = member.state
            if member.state is SlotState.RUNNING and member.remote.realtime is not None:
                resetting = member.remote.realtime.resetting
                if resetting is not None:
                    states[member.slots][resetting] = SlotState.RESETTING
        return states

    def _seconds_away(self) -> Array:
        now, away = time.monotonic(), np.zeros(self.num_envs)
        for member in self.pool.members:
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
            for member in (*self.pool.members, *self.pool.spares)
        )

    def wait_for_lanes(self) -> None:
        """Have real-time worlds of lanes answer only when every lane has an observation."""
        self.pool.waits_for_lanes = True
        for member in self.pool.members:
            member.remote.session.wait_for_all()

    @property
    def fps(self) -> float | None:
        """Frames a second of the real-time worlds, of the fastest where they differ; None: they wait for actions."""
        rates = [
            member.remote.info.fps for member in self.pool.members if member.remote.info and member.remote.info.fps
        ]
        return max(rates, default=None)

    @property
    def server_versions(self) -> tuple[str | None, ...]:
        """The version of each slot's server, None for one that is not ours (U-12)."""
        versions = [(member.lanes, member.remote.info) for member in self.pool.members]
        return tuple(
            world_info.server_version if world_info else None for lanes, world_info in versions for _ in range(lanes)
        )

    def latency_summary(self) -> tuple[dict[str, Any], ...]:
        """Return for each remote `url`, and percentiles of `round_trip` and `observation_age` in seconds (U-11)."""
        return tuple(
            {"url": member.remote.url, **member.remote.realtime.latency.summary()}
            for member in self.pool.members
            if member.remote.realtime is not None
        )

    @property
    def urls(self) -> tuple[str, ...]:
        """The URL of each slot's remote."""
        return tuple(member.remote.url for member in self.pool.members for _ in range(member.lanes))

    # Calls

    def _ask_all(self, send: Callable[[Member], None], purpose: str) -> list[tuple[Member, pb.EnvironmentResponse]]:
        """Send one request to every remote and wait for all answers."""
        with self.exclusive(purpose):
            self.pool.ask_members(purpose, self.pool.members, send)
            return self.pool.replies()

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
            self.pool.ask_members(
                f"call of {name}", self.pool.members, lambda member: member.remote.call(name, args, kwargs)
            )
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
                answers = self.pool.replies(timeout)
            except RemoteTimeoutError:
                if self.pool.question is None:
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
            self.pool.ask_members(
                f"call of {name}",
                [member for member in self.pool.members if member.start in lanes],
                lambda member: member.remote.call(
                    name, args, kwargs, () if len(lanes[member.start]) == member.lanes else lanes[member.start]
                ),
            )
            answers = self.pool.replies()
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
            for member in self.pool.members
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
        partial = any(len(lanes[member.start]) < member.lanes for member in self.pool.members if member.start in lanes)
        before = self.get_attr(name) if partial else (None,) * self.num_envs
        items = [value if slot in set(slots) else before[slot] for slot in range(self.num_envs)]
        with self.exclusive(f"setting of {name}"):
            self.pool.ask_members(
                f"setting of {name}",
                [member for member in self.pool.members if member.start in lanes],
                lambda member: member.remote.write_property(f"world.attributes.{name}", items[member.slots]),
            )
            self.pool.replies()

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
            self.pool.close(2.0)

    def __del__(self) -> None:
        if "pool" in self.__dict__ and not self.closed:  # else __init__ was never called, or raised early
            self.pool.close(0.0)


def checked_urls(urls: Any) -> list[str]:
    """Return the URLs as a list, or raise SettingError where they are none."""
    found = [urls] if isinstance(urls, str) else list(urls)
    if not found:
        raise SettingError("expected a URL, or a list of them with at least one, got an empty list")
    return found


def with_agents(urls: list[str], agent: str | Sequence[str] | None) -> list[tuple[str, str | None]]:
    """Return each URL with the agent to join it as, or raise SettingError where they do not fit."""
    names = [agent] * len(urls) if agent is None or isinstance(agent, str) else list(agent)
    if len(urls) == 1:
        urls = urls * len(names)
    if not names or len(names) != len(urls):
        raise SettingError(f"expected agent to have a name for each of {len(urls)} URLs, got {agent!r:.80}")
    return list(zip(urls, names, strict=True))


def make_vec_remote(
    urls: str | Sequence[str],
    *,
    num_envs: int | None = None,
    env_id: str | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    render_mode: str | None = None,
    agent: str | Sequence[str] | None = None,
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

    `urls` holds a URL for each world, or is one URL of which `num_envs` slots are made. `perlert://` URLs are a slot
    each and do not mix with others; they give a `bridge.perlert.PerlertVectorEnv`. The keywords are those of
    `RemoteVectorEnv`; with `perlert://` URLs those of `bridge.perlert.PerlertVectorEnv` too.

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
