"""One place in a world, over one stream: requests go out, answers come in, each matched to its request.

`Remote` never blocks and never waits: a script of requests (connect, create, join, read the properties) is fed with
the answers as they come, and so a hundred of them connect at once without a thread of ours. Waiting is the business of
its owner, who takes from the one queue that all its remotes deliver to.
"""

from __future__ import annotations

import enum
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from google.protobuf.message import DecodeError

from bridge import values
from bridge.client.connect import AnyCall, close_all, connect
from bridge.client.poller import Poller
from bridge.client.realtime import SIGNALS as REALTIME_SIGNALS
from bridge.client.realtime import RealtimeReader
from bridge.client.reconnect import RemoteRecord
from bridge.client.step_reader import SIGNALS as STEP_SIGNALS
from bridge.client.step_reader import StepReader
from bridge.client.world_request import WorldInfo, WorldRequest
from bridge.errors import (
    Code,
    EnvironmentFailedError,
    PeerError,
    RefusedError,
    RemoteError,
    RemoteTimeoutError,
    SettingError,
    TensorError,
)
from bridge.forks import leak
from bridge.pb import bridge_pb2, properties_pb2
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.properties import read_encoded
from bridge.space_json import space_from_json
from bridge.spaces import Column, Layout, space_from_specs
from bridge.step_codec import StepAnswer, StepCodec
from bridge.tensors import Array, Spec, fill_tensor, pack_tensor, unpack_tensor
from bridge.wire import CALL_REQUEST_URL, NO_SEED, PROPERTY_REQUEST_URL

__all__ = [
    "ENDED",
    "Answer",
    "Delivery",
    "Remote",
    "SlotState",
    "close_remotes",
    "reset_settings",
]


class SlotState(enum.IntEnum):
    """Where a slot of a vector environment is; `infos["slot_state"]` holds these numbers."""

    CONNECTING = 0
    """Its remote is being connected."""
    RESETTING = 1
    """Its next episode was asked for and has not begun."""
    RUNNING = 2
    """It is in an episode, or has just ended one."""
    LOST = 3
    """Its remote is gone; it is connected again after a while."""


class Answer(NamedTuple):
    """What came back."""

    kind: str
    """`ready` (joined), `step` (a Step was answered), `failed` (a Step or Reset was refused), `lost`, or `other`."""
    message: pb.EnvironmentResponse | StepAnswer | None = None
    error: RemoteError | None = None


class _Pending(NamedTuple):
    """A request whose answer is outstanding."""

    kind: str
    episode: int
    """The episode that it belongs to; of kind `other`: how often such requests had been given up."""
    sent: float
    """Seconds."""


Delivery: TypeAlias = "tuple[Remote, int, bytes | bytearray | RemoteError]"
"""What an poller holds: for whom, the number of the connection, and what came."""
ENDED = (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED)
"""With what a Step or Reset is refused where the world is gone."""
_SILENT = "nothing has come from there at all: are host and port right, and does no firewall stand between?"
_MAX_RENUMBERED = 3
_INTEGERS = (int, np.int64, np.int32)
# Integer actions whose Steps are remembered.
_MOST_KNOWN = 1024

Script = Generator[pb.EnvironmentRequest, pb.EnvironmentResponse, None]


class Remote:
    """A place in a world: of one environment, of one agent, or of all lanes.

    Args:
        world_request: The world wanted.
        poller: Gets this remote, its connection's number, and what came.
        max_message_bytes: The largest request or answer.
        transport: What to connect by, as for `connect`.
        shared: Whether there are other remotes to the same place.
    """

    def __init__(
        self,
        world_request: WorldRequest,
        poller: Poller[Delivery],
        max_message_bytes: int,
        transport: str = "http2",
        *,
        shared: bool = False,
    ) -> None:
        self.request = world_request
        self.url = world_request.address.url
        self.info: WorldInfo | None = None
        self.world: str | None = None
        """The name of the world that was asked for last."""
        self.stale = 0
        """Answers of episodes that had been given up, dropped."""
        self._poller = poller
        self._transport = transport
        self._shared = shared
        self.record = RemoteRecord()
        """Its failures, and what they cost."""
        self._max_message_bytes = max_message_bytes
        self._call: AnyCall | None = None
        self._number = 0
        self._script: Script | None = None
        self._pending: deque[_Pending] = deque()
        self._episode = 0
        self._asked = 0
        self._created: str | None = None
        self._first_step = b""
        self._codec: StepCodec | None = None
        self._known: dict[Any, bytes] = {}
        self.reader: StepReader
        """Reads the answers to Steps; set when a world is joined."""
        self._action_layout: Layout
        self._action_uids: tuple[int, ...] = ()
        self._uids: dict[str, int] = {}
        self._arrivals: deque[float] = deque()
        self.now: Callable[[], float] = time.monotonic
        """What tells the time."""
        self.realtime: RealtimeReader | None = None
        """Reads what only a real-time world answers; None: this is none."""
        self._waits_for_all = False
        self._specs = pb.ActionObservationSpecs()
        self._settings: Mapping[str, pb.Tensor] = {}
        self._renumbered = 0

    def options(self, options: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return the reset options to send: another server than ours, which may know none, gets no empty ones."""
        return options if options or self.info is None or self.info.server_version is not None else None

    def parts(self) -> tuple[WorldRequest, int, WorldInfo | None]:
        """What a copy of this remote is made of, in another process too."""
        return self.request, self._max_message_bytes, self.info

    @classmethod
    def of_parts(
        cls,
        parts: tuple[WorldRequest, int, WorldInfo | None],
        poller: Poller[Delivery],
        transport: str = "http2",
        *,
        shared: bool = False,
    ) -> Remote:
        """Make a remote that knows what another one knew, and has no connection."""
        world_request, max_message_bytes, world_info = parts
        remote = cls(world_request, poller, max_message_bytes, transport, shared=shared)
        remote.info = world_info
        return remote

    # Connecting

    def open(self) -> None:
        """Start to connect; `feed` says `ready` when the world is joined."""
        self._number += 1
        number = self._number
        self._pending.clear()
        self._created = None
        arrivals = self._arrivals = deque()

        def came(what: bytes | bytearray | RemoteError) -> Delivery:
            arrivals.append(self.now())
            return self, number, what

        self._call = connect(
            self.request.address,
            self._poller,
            came,
            self._max_message_bytes,
            self._transport,
            shared=self._shared,
        )
        self._script = self._join()
        self._send(next(self._script), "script")

    def _join(self) -> Script:
        """Create a world and join it, or join what there is; then learn what the server tells of it."""
        name = self.request.address.world
        if name is None:
            settings = self.request.settings()
            try:
                response = yield pb.EnvironmentRequest(create_world=pb.CreateWorldRequest(settings=settings))
                self._created = name = response.create_world.world_name
            except RefusedError:
                if settings:
                    raise
                name = ""  # D-4: a server may have but one world, and refuse to make others
        self.world = name
        texts = dict(self.request.join_settings)
        if self.request.agent is not None:
            texts["agent"] = self.request.agent
        settings = {key: pack_tensor(value) for key, value in texts.items()}
        response = yield pb.EnvironmentRequest(join_world=pb.JoinWorldRequest(world_name=name, settings=settings))
        specs = response.join_world.specs
        version = self._call.server_version if self._call else None
        world_info: dict[str, Any] = {}
        if version is not None:
            keys = ("observation_space", "action_space", "num_envs", "env_id", "metadata", "render_mode", "spec")
            for key in keys:
                response = yield _property_request(f"world.{key}")
                world_info[key] = property_value(response, self.url, key in ("metadata", "spec"))
            if any(spec.name == "frames" for spec in specs.observations.values()):
                response = yield _property_request("world.fps")
                world_info["fps"] = property_value(response, self.url, True)
        self._learn(specs, version, world_info)

    def _learn(self, specs: pb.ActionObservationSpecs, version: str | None, world_info: Mapping[str, Any]) -> None:
        """Make sense of a joined world's specs and properties."""
        self._specs = specs
        observations = {uid: Spec.from_proto(spec) for uid, spec in specs.observations.items()}
        actions = {uid: Spec.from_proto(spec) for uid, spec in specs.actions.items()}
        foreign = version is None
        signals: tuple[str, ...] = (
            ("reward", "discount") if foreign else ("reward", "discount", "terminated", "truncated", "info")
        )
        if not foreign:
            signals += REALTIME_SIGNALS
        self._uids = {spec.name: uid for uid, spec in observations.items() if spec.name in signals}
        lanes = None if foreign else int(world_info["num_envs"]) or None
        if foreign:
            parts = [spec for uid, spec in sorted(observations.items()) if spec.name not in signals]
            observation_space = space_from_specs(parts, "observation")
            action_space = space_from_specs([spec for _, spec in sorted(actions.items())], "action")
            if "reward" not in self._uids and self.info is None:
                warnings.warn(
                    f"{self.url} gives no observation named reward: every reward is 0.0", RuntimeWarning, stacklevel=2
                )
        else:
            observation_space = space_from_json(str(world_info["observation_space"]))
            action_space = space_from_json(str(world_info["action_space"]))
        layout = Layout(observation_space, "observation", lanes, foreign=foreign)
        self._action_layout = Layout(action_space, "action", lanes, foreign=foreign)
        by_name = {spec.name: (uid, spec) for uid, spec in observations.items()}
        action_by_name = {spec.name: uid for uid, spec in actions.items()}
        try:
            leaves = [by_name[leaf.name] for leaf in layout.leaves]
            self._action_uids = tuple(action_by_name[leaf.name] for leaf in self._action_layout.leaves)
        except KeyError as error:
            raise PeerError(self.url, f"its specs have no {error.args[0]!r}, which its spaces need") from error
        if "frames" in self._uids:
            single = Layout(observation_space, "observation")
            before, self.realtime = (
                self.realtime,
                RealtimeReader(self.url, self._uids, lanes, single, self.request.diagnostics),
            )
            if before is not None:
                self.realtime.stale = before.stale
            if self._waits_for_all:
                self.realtime.wait_for_all()
        self.reader = StepReader(self.url, layout, leaves, self._uids, self.realtime)
        self._request_observations()
        self._codec = None
        self._known.clear()
        if not foreign and self.realtime is None and all(name in self._uids for name in STEP_SIGNALS):
            # Other servers write their messages in another way.
            order = [(uid, observations[uid]) for uid in self.reader.wanted]
            self._codec = StepCodec.make([(uid, actions[uid]) for uid in self._action_uids], order)
        self.info = WorldInfo(
            observation_space,
            action_space,
            lanes,
            world_info.get("env_id") or None,
            world_info.get("metadata") or {},
            world_info.get("render_mode") or None,
            world_info.get("spec"),
            version,
            world_info.get("fps"),
        )

    def _request_observations(self) -> None:
        wanted = self.reader.wanted + (self.realtime.wanted if self.realtime is not None else [])
        request = pb.EnvironmentRequest(step=pb.StepRequest(requested_observations=wanted))
        self._first_step = request.SerializeToString()

    def wait_for_all(self) -> None:
        """Of a real-time world of lanes: have answers wait until every lane has an observation."""
        self._waits_for_all = True
        if self.realtime is not None:
            self.realtime.wait_for_all()
            self._request_observations()

    def salvage(self, message: pb.EnvironmentResponse | StepAnswer | None) -> None:
        """Keep the ends of episodes out of a Step's answer that nobody will read."""
        if not isinstance(message, pb.EnvironmentResponse) or self.realtime is None:
            return
        if message.WhichOneof("payload") == "step":
            self.realtime.stale += 1
            self.realtime.salvage(message)

    @property
    def slots(self) -> int:
        """The number of slots that this remote fills."""
        return 1 if self.info is None else self.info.lanes or 1

    @property
    def connected(self) -> bool:
        """Whether there is a connection, joined or not."""
        return self._call is not None

    def late(self, purpose: str, timeout: float) -> RemoteTimeoutError:
        """Return the error of what has not come within `timeout` seconds; it says why, as far as that can be known."""
        silent = self._call is not None and self._call.silent
        hint = _SILENT if silent else "is the environment stuck, or timeout= too short?"
        return RemoteTimeoutError(self.url, f"no answer {purpose} within {timeout:g} s; {hint}")

    # Requests

    def _send(self, request: pb.EnvironmentRequest | bytes, kind: str) -> None:
        if self._call is None:
            raise PeerError(self.url, "there is no connection")
        data = request if isinstance(request, bytes) else request.SerializeToString()
        pending = _Pending(kind, self._asked if kind == "other" else self._episode, self.now())
        self._call.send(data)
        self._pending.append(pending)  # what is too large was not sent, and gets no answer

    def begin(self, settings: Mapping[str, pb.Tensor] | None = None, *, reset: bool = True) -> None:
        """Ask for the first Step of the next episode; what still comes of the present one is dropped.

        Args:
            settings: For a Reset before it.
            reset: Whether to send a Reset; after an episode's end a Step alone begins the next (D-9).
        """
        self._episode += 1
        self._settings = settings or {}
        if reset:
            self._send(pb.EnvironmentRequest(reset=pb.ResetRequest(settings=settings or {})), "reset")
        self._send(self._first_step, "step")

    def drop_answers(self) -> None:
        """Drop the answers to the Steps that are on their way."""
        self._episode += 1

    def step(self, arrays: Sequence[Array], action: Any = None) -> None:
        """Ask for a Step with the arrays of the action's tensors; an integer `action` is remembered."""
        data = self._codec.write_request(arrays) if self._codec is not None else None
        if data is not None:
            if type(action) in _INTEGERS and len(self._known) < _MOST_KNOWN:
                self._known[action] = data
            self._send(data, "step")
            return
        request = pb.EnvironmentRequest()
        actions = request.step.actions
        for uid, array in zip(self._action_uids, arrays, strict=True):
            fill_tensor(actions[uid], array)
        request.step.SetInParent()
        # Two serialized messages in a row are their merged one: what is constant was serialized at the join.
        self._send(self._first_step + request.SerializeToString(), "step")

    @property
    def form(self) -> object | None:
        """What remotes have in common whose Steps `write_steps` may write together; None: nothing."""
        return None if self._codec is None or self.slots > 1 else self._codec.form

    def write_steps(self, columns: Sequence[Column], slots: Sequence[int]) -> list[bytes] | None:
        """Return the Steps with the actions of some slots, for `send_step`; None: `step_columns` is to do it."""
        arrays = [column for column in columns if isinstance(column, np.ndarray)]
        if self._codec is None or len(arrays) < len(columns):
            return None
        whole = len(slots) == len(arrays[0])
        return self._codec.write_requests(arrays if whole else [array[list(slots)] for array in arrays])

    def send_step(self, request: bytes) -> None:
        """Ask for a Step that `write_steps` wrote."""
        self._send(request, "step")

    def step_again(self, action: Any) -> bool:
        """Ask for a Step with an integer action that was sent before; return False where it was not."""
        data = self._known.get(action) if type(action) in _INTEGERS else None
        if data is None:
            return False
        self._send(data, "step")
        return True

    def step_columns(self, columns: Sequence[Column] | None, slot: int) -> None:
        """Ask for a Step with the actions of this remote's slots, from `slot` on; None: without an action."""
        if columns is None:
            self._send(self._first_step, "step")
        else:
            self.step(self._action_layout.pack_columns(columns, slot))

    def act_columns(self, columns: Sequence[Column], slot: int) -> None:
        """Leave actions in a real-time world; what comes of them is asked for by a later Step."""
        if self.realtime is None:
            raise PeerError(self.url, "only a real-time world takes actions ahead of a Step")
        request = pb.EnvironmentRequest()
        for uid, array in zip(self._action_uids, self._action_layout.pack_columns(columns, slot), strict=True):
            fill_tensor(request.step.actions[uid], array)
        request.step.requested_observations.append(self._uids["timing"])
        self._send(request, "act")

    def read_property(self, key: str) -> None:
        """Ask for a property's value."""
        self._send(_property_request(key), "other")

    def write_property(self, key: str, value: Any) -> None:
        """Ask to set a property that takes any value."""
        tensor = pack_tensor(np.frombuffer(values.encode(value), np.uint8))
        body = properties_pb2.PropertyRequest(write_property=properties_pb2.WritePropertyRequest(key=key, value=tensor))
        self._send(_extension(PROPERTY_REQUEST_URL, body), "other")

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], lanes: Sequence[int] = ()) -> None:
        """Ask to call a method, on all lanes or on some."""
        body = bridge_pb2.CallRequest(
            name=name,
            args=bridge_pb2.Value.List(items=[values.to_value(item) for item in args]),
            kwargs=bridge_pb2.Value.Dict(keys=list(kwargs), values=[values.to_value(item) for item in kwargs.values()]),
            lanes=lanes,
        )
        self._send(_extension(CALL_REQUEST_URL, body), "other")

    def drop_replies(self) -> None:
        """Drop the answers to properties and calls that are still to come."""
        self._asked += 1

    # Answers

    def feed(self, number: int, what: bytes | bytearray | RemoteError) -> Answer | None:
        """Take what was delivered; return what it means, or None where it means nothing any more."""
        if number != self._number or self._call is None:
            self.stale += 1
            return None
        arrived = self._arrivals.popleft() if self._arrivals else self.now()
        if isinstance(what, RemoteError):
            self.drop()
            return Answer("lost", error=what)
        pending = self._pending[0] if self._pending else None
        if self._codec is not None and pending is not None and pending.kind == "step":
            found = self._codec.read_response(what)
            if found is not None:
                self._pending.popleft()
                if pending.episode == self._episode:
                    self._renumbered = 0
                    return Answer("step", found)
                self.stale += 1
                return None
        try:
            message = pb.EnvironmentResponse.FromString(bytes(what))
        except DecodeError as problem:
            return self._broken(f"it sent {len(what)} bytes that are no EnvironmentResponse: {problem}")
        if not self._pending:
            return self._broken("it sent an answer to no request")
        pending = self._pending.popleft()
        kind = message.WhichOneof("payload")
        error = self._refusal(message) if kind == "error" else None
        if pending.kind == "script":
            return self._continue(message, error)
        if pending.kind == "act":
            if pending.episode == self._episode and error is not None:
                return Answer("failed", error=error)
            return None
        if pending.kind in ("step", "reset"):
            if pending.episode != self._episode:
                self.stale += 1
                self.salvage(message)
                return None
            ours = self.info is not None and self.info.server_version is not None
            if ours and isinstance(error, RefusedError) and error.code in ENDED:
                self._finish(0.0)  # connecting again makes another world; of other servers an error ends nothing (D-2)
                return Answer("lost", error=error)
            if error is not None:
                if pending.kind == "reset":
                    self._episode += 1  # the Step sent after it began something else, if anything
                return Answer("failed", error=error)
            if kind != pending.kind:
                return self._broken(f"it answered a {pending.kind} by {kind}")
            if kind == "reset":
                return self._compare(message.reset.specs)
            self._renumbered = 0
            if self.realtime is not None:
                self.realtime.timed(pending.sent, arrived)
            return Answer("step", message)
        if pending.episode != self._asked:
            self.stale += 1
            return None
        return Answer("other", message, error)

    def _compare(self, specs: pb.ActionObservationSpecs) -> Answer | None:
        """Look at the specs that came with a Reset: another server's may change (D-14, D-24)."""
        if self.info is None or self.info.server_version is not None or specs == self._specs or not specs.ByteSize():
            return None
        changes = _changes(self._specs, specs)
        if changes:
            self.drop_answers()
            return Answer("failed", error=PeerError(self.url, f"its specs changed at Reset: {changes}; connect anew"))
        self._renumbered += 1
        if self._renumbered > _MAX_RENUMBERED:
            return self._broken("it gives its specs other UIDs at every Reset")
        # The Step that is on its way asks for the old UIDs: begin again with the new ones.
        self._learn(specs, None, {})
        self.begin(self._settings)
        return None

    def _refusal(self, message: pb.EnvironmentResponse) -> RefusedError:
        status = message.error
        kind = EnvironmentFailedError if status.code == Code.INTERNAL else RefusedError
        return kind(self.url, status.message or "no message", status.code)

    def _continue(self, message: pb.EnvironmentResponse, error: RefusedError | None) -> Answer | None:
        script = self._script
        if script is None:
            return self._broken("it sent an answer to no request")
        try:
            self._send(script.throw(error) if error is not None else script.send(message), "script")
        except StopIteration:
            self._script = None
            return Answer("ready")
        except (RemoteError, TensorError) as problem:
            self._finish(0.5)
            return Answer(
                "lost", error=problem if isinstance(problem, RemoteError) else PeerError(self.url, str(problem))
            )
        return None

    def _broken(self, reason: str) -> Answer:
        self._finish(0.0)
        return Answer("lost", error=PeerError(self.url, f"it broke the protocol: {reason}"))

    # The end

    def disown(self, poller: Poller[Delivery]) -> None:
        """In a forked process: leave the connection to the parent process, untouched, and have none."""
        if self._call is not None:
            leak(self._call)
            leak(self._poller)
        self._call = None
        self._script = None
        self._created = None
        self._pending.clear()
        self._poller = poller

    def drop(self) -> None:
        """Give up a connection that has ended."""
        self._finish(0.0)

    def leave(self) -> None:
        """Leave the world, destroy it where it was made for this remote, and send no more; `close` then waits."""
        if self._call is None:
            return
        if self._script is None and self.info is not None:
            self._send(pb.EnvironmentRequest(leave_world=pb.LeaveWorldRequest()), "other")
            if self._created:
                self._send(
                    pb.EnvironmentRequest(destroy_world=pb.DestroyWorldRequest(world_name=self._created)), "other"
                )
        self._call.finish()

    def close(self, timeout: float) -> None:
        """Leave the world and end the connection, within `timeout` seconds."""
        close_remotes([self], timeout)

    def detach(self) -> AnyCall | None:
        """Give up the connection, if there is one, and return it to be closed."""
        call, self._call = self._call, None
        self._script = None
        self._pending.clear()
        return call

    def _finish(self, timeout: float) -> None:
        call = self.detach()
        if call is not None:
            call.close(timeout)


def close_remotes(remotes: Sequence[Remote], timeout: float) -> None:
    """Leave the worlds and end the connections, within `timeout` seconds in all."""
    for remote in remotes:
        remote.leave()
    detached = [remote.detach() for remote in remotes]
    close_all([connection for connection in detached if connection is not None], timeout)


def _changes(before: pb.ActionObservationSpecs, after: pb.ActionObservationSpecs) -> str:
    """Say what differs between specs, their UIDs apart; nothing where nothing does."""
    found = []
    for what, old, new in (
        ("action", before.actions, after.actions),
        ("observation", before.observations, after.observations),
    ):
        olds, news = ({spec.name: spec for spec in specs.values()} for specs in (old, new))
        for name in (*olds, *(name for name in news if name not in olds)):
            if name not in news:
                found.append(f"the {what} {name!r} is gone")
            elif name not in olds:
                found.append(f"the {what} {name!r} is new")
            elif olds[name] != news[name]:
                was, now = (Spec.from_proto(specs[name]).describe() for specs in (olds, news))
                found.append(f"the {what} {name!r} was {was}, and is {now}")
    return "; ".join(found)


def reset_settings(
    seed: int | Sequence[int | None] | None = None,
    options: Mapping[str, Any] | None = None,
    reset_mask: Array | None = None,
) -> dict[str, pb.Tensor]:
    """Return the Reset settings for one environment, or with a list of seeds or a mask for lanes.

    Raises:
        SettingError: A seed is no non-negative 64-bit integer, or an option cannot be sent.
    """
    settings: dict[str, pb.Tensor] = {}
    if isinstance(seed, (int, np.integer)):
        settings["seed"] = pack_tensor(_seed(seed))
    elif seed is not None and any(item is not None for item in seed):
        settings["seed"] = pack_tensor(np.array([NO_SEED if item is None else _seed(item) for item in seed], np.int64))
    if options is not None:
        try:
            settings["options"] = pack_tensor(np.frombuffer(values.encode(dict(options)), np.uint8))
        except TensorError as error:
            raise SettingError(f"the reset options cannot be sent: {error}") from error
    if reset_mask is not None:
        settings["reset_mask"] = pack_tensor(reset_mask)
    return settings


def _seed(seed: Any) -> int:
    if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool) or not 0 <= seed < 1 << 63:
        raise SettingError(f"expected a seed from 0 to 2**63 - 1, or None, got {seed!r}")
    return int(seed)


def _extension(url: str, body: Any) -> pb.EnvironmentRequest:
    request = pb.EnvironmentRequest()
    request.extension.type_url = url
    request.extension.value = body.SerializeToString()
    return request


def _property_request(key: str) -> pb.EnvironmentRequest:
    body = properties_pb2.PropertyRequest(read_property=properties_pb2.ReadPropertyRequest(key=key))
    return _extension(PROPERTY_REQUEST_URL, body)


def property_value(message: pb.EnvironmentResponse, url: str, encoded: bool) -> Any:
    try:
        response = properties_pb2.PropertyResponse.FromString(message.extension.value)
        tensor = response.read_property.value
        return read_encoded(tensor) if encoded else unpack_tensor(tensor)[()]
    except (DecodeError, TensorError) as error:
        raise PeerError(url, f"its property cannot be read: {error}") from error
