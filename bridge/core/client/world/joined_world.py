"""A joined world, made from its specs and properties: its spaces, and the objects that write and read its Steps."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.core.client.world.steps import SIGNALS, StepMessage, StepReader, StepWriter
from bridge.core.client.world.world_request import WorldInfo, WorldRequest
from bridge.core.encoding.names import REALTIME_SIGNALS, KnownNames
from bridge.core.encoding.space_json import plain_space_from_json, space_from_json
from bridge.core.encoding.spaces import Layout
from bridge.core.encoding.step_codec import StepCodec
from bridge.core.encoding.tensors import Spec, fill_tensor
from bridge.errors import UNREADABLE, PeerError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb

if TYPE_CHECKING:
    from bridge.core.client.realtime.answer_buffer import AnswerBuffer
    from bridge.core.client.realtime.reader import RealtimeReader

__all__ = ["JoinedWorld", "changes_of"]

_MOST_LANES, _MOST_FPS = 1 << 20, 10_000


class JoinedWorld:
    """A world that was joined.

    Args:
        request: The world that was requested.
        specs: The specs of the world.
        properties: The properties that a server of this package sent, of `WORLD_PROPERTIES` and further ones.
        version: The version of a server of this package; None: another server.

    Raises:
        PeerError: Specs and spaces contradict each other.
        TensorError: A spec cannot be read, or has no space.
    """

    def __init__(
        self,
        request: WorldRequest,
        specs: pb.ActionObservationSpecs,
        properties: Mapping[str, Any],
        version: str | None,
    ) -> None:
        url, foreign = request.address.url, version is None
        self.specs = specs
        observations, actions = _read_specs(specs.observations), _read_specs(specs.actions)
        # At another package's server an observation named `info` or `frames` is an ordinary one.
        signals = ("reward", "discount") if foreign else (*SIGNALS, "discount", *REALTIME_SIGNALS)
        self._uids = {spec.name: uid for uid, spec in observations.items() if spec.name in signals}
        if version is None:
            from bridge.core.encoding.space_specs import space_from_specs

            # A map has no order on the wire. Ordered by UID, the parts are the same at each join.
            parts = [spec for _, spec in sorted(observations.items()) if spec.name not in signals]
            acts = [spec for _, spec in sorted(actions.items())]
            self.info = WorldInfo(space_from_specs(parts, "observation"), space_from_specs(acts, "action"))
        else:
            self.info = _describe(request, version, properties)
        lanes = self.info.lanes
        layout = Layout(self.info.observation_space, "observation", lanes, foreign=foreign)
        action_layout = Layout(self.info.action_space, "action", lanes, foreign=foreign)
        by_name = {spec.name: (uid, spec) for uid, spec in observations.items()}
        action_by_name = {spec.name: uid for uid, spec in actions.items()}
        try:
            leaves = [by_name[leaf.name] for leaf in layout.leaves]
            action_uids = tuple(action_by_name[leaf.name] for leaf in action_layout.leaves)
        # The specs come with the join, the spaces as properties: a broken server may contradict itself.
        except KeyError as error:
            raise PeerError(url, f"its specs have no {error.args[0]!r}, which its spaces need") from error
        self.realtime: RealtimeReader | None = None
        """Reads the signals of a real-time world; None: this is none."""
        self.answers: AnswerBuffer | None = None
        """The results of Steps in flight; None: each Step waits for its own answer."""
        self._episode_uid = 0  # with Steps in flight, the UID of the action that says which episode a Step is for
        if "frames" in self._uids:
            # Imported here, because clients of lock-step worlds do not need it.
            from bridge.core.client.realtime.answer_buffer import AnswerBuffer
            from bridge.core.client.realtime.reader import RealtimeReader

            single = Layout(self.info.observation_space, "observation")
            in_flight = "round_trip" in properties  # the server holds Steps until there is a new frame
            self.realtime = RealtimeReader(url, self._uids, lanes, single, request.diagnostics, in_flight=in_flight)
            tensors = [(uid, leaf) for (uid, _), leaf in zip(leaves, layout.leaves, strict=True)]
            if in_flight:
                fps, round_trip = float(properties["fps"]), float(properties["round_trip"])
                uid = properties["episode_uid"]
                if not isinstance(uid, np.integer) or uid <= 0 or int(uid) in specs.actions:
                    raise TensorError(f"expected world.episode_uid to be the UID of a further action, got {uid!r:.80}")
                self._episode_uid = int(uid)
                self.answers = AnswerBuffer(self._uids, tensors, lanes, fps, round_trip, self.realtime.latency)
        self.reader = StepReader(url, layout, leaves, self._uids, self.realtime)
        if "names" in properties:
            self.reader.names = KnownNames(str(properties["names"]))
        self.codec: StepCodec | None = None
        """Writes and reads Steps without protobuf; None: protobuf does."""
        if not foreign and self.realtime is None and all(name in self._uids for name in SIGNALS):
            # Other servers write their messages in another way.
            order = [(uid, observations[uid]) for uid in self.reader.wanted]
            written = [(uid, actions[uid]) for uid in action_uids]
            self.codec = StepCodec.make(written, order)
        self.reads_columns = bool(properties.get("reads_columns"))
        """True if the server can read long lists of similar items as columns."""
        self.writer = StepWriter(request, action_layout, action_uids, self._wanted(), self.codec)
        """Writes Steps."""

    @property
    def names(self) -> KnownNames | None:
        """The names of the environment's attributes and methods; None: they are not known."""
        return self.reader.names

    @property
    def allowance(self) -> float:
        """Seconds by which a step may exceed a deadline, so that a person who has taken over can follow it."""
        return self.reader.allowance

    def _wanted(self) -> list[int]:
        return self.reader.wanted + (self.realtime.wanted if self.realtime is not None else [])

    def wait_for_all(self) -> None:
        """Delay answers until every lane has an observation, in a real-time world of lanes."""
        if self.realtime is not None:
            self.realtime.wait_for_all()
            if self.answers is not None:
                self.answers.waits_for_all = True
            self.writer.ask_for(self._wanted())

    def dropped(self) -> None:
        """Count an answer that a later `reset` made useless."""
        if self.realtime is not None:
            self.realtime.stale += 1

    def salvage(self, message: StepMessage | None) -> None:
        """Store the parts of an unread answer to a Step that are sent only once."""
        if isinstance(message, pb.EnvironmentResponse) and message.WhichOneof("payload") != "step":
            return
        if message is not None:
            # Nothing waits for the answer, and the connection may be about to be closed.
            with contextlib.suppress(PeerError, *UNREADABLE):
                self.reader.take_remarks(message)
        # The codec does not read real-time worlds, so its own messages have no records.
        if isinstance(message, pb.EnvironmentResponse) and self.realtime is not None:
            self.dropped()
            self.realtime.salvage(message)

    def as_act(self, request: bytes) -> pb.EnvironmentRequest:
        """Return an action-only Step, which requests only times, and which the server applies when it arrives."""
        message = pb.EnvironmentRequest.FromString(request)
        message.step.requested_observations[:] = [self._uids["timing"]]
        # U-5: with Steps in flight the next episode may have begun by then, of which nothing is known here yet.
        if self.answers is not None:
            fill_tensor(message.step.actions[self._episode_uid], self.answers.episodes)
        return message


def _read_specs(specs: Mapping[int, pb.TensorSpec]) -> dict[int, Spec]:
    return {uid: Spec.from_proto(spec) for uid, spec in specs.items()}


def _describe(request: WorldRequest, version: str, properties: Mapping[str, Any]) -> WorldInfo:
    """Return a world's description from the properties of a server of this package."""
    read = plain_space_from_json if request.plain_spaces else space_from_json
    rewards, lanes, fps = properties.get("reward_space"), int(properties["num_envs"]), properties.get("fps")
    # Memory is allocated for each lane, and each frame may cost a poll of the socket.
    if not 0 <= lanes <= _MOST_LANES or (fps is not None and not 0 < fps <= _MOST_FPS):
        raise TensorError(
            f"expected at most {_MOST_LANES} lanes and {_MOST_FPS} frames a second, got {lanes} and {fps}"
        )
    return WorldInfo(
        read(str(properties["observation_space"])),
        read(str(properties["action_space"])),
        lanes or None,
        properties.get("env_id") or None,
        dict(properties.get("metadata") or {}),
        properties.get("render_mode") or None,
        dict(properties.get("spec") or {}),
        version,
        space_from_json(rewards) if rewards else None,
        fps,
    )


def changes_of(before: pb.ActionObservationSpecs, after: pb.ActionObservationSpecs) -> str:
    """Return the differences between specs, except for UIDs; "" if there are none."""
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
