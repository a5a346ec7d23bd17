"""A second stream that carries the actions of an agent in a real-time world, for older clients of this package.

At older servers, an action waited behind Steps that the server held until the next frame. So older clients with Steps
in flight send their actions on a separate stream. Current clients need only one stream: see
`bridge.core.server.session.Session.arrive`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from bridge.core.encoding.properties import PropertyTree
from bridge.core.encoding.tensors import Array, Spec
from bridge.core.worlds.agent import EnvAgent
from bridge.core.worlds.base import Agent
from bridge.core.worlds.settings import Settings, read_scalar, refuse_unknown
from bridge.errors import Code, RequestError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.pb import properties_pb2

__all__ = ["ActingStreams", "ActionTaker"]

_KEY_BYTES = 16


class ActionTaker(Protocol):
    """The receiver of actions: the world's clock."""

    def now(self) -> float:
        """Return the clock's time, seconds."""

    def act(self, agent: EnvAgent, action: object, received: float, episodes: Sequence[int]) -> None:
        """Record an agent's action for the next frames."""


class ActingStreams(dict[str, EnvAgent]):
    """The agents whose property `world.seat` was read, by the key that it returned.

    Args:
        pacer: The world's clock, which receives the actions.
    """

    def __init__(self, pacer: ActionTaker) -> None:
        super().__init__()
        self.pacer = pacer

    def key_of(self, agent: EnvAgent) -> str:
        """Return the secret key of an agent. It is the same in each call."""
        known = next((key for key, other in self.items() if other is agent), None)
        # One key for each agent: `leave` removes one key, and a second one would still work after the agent has left.
        key = known or secrets.token_urlsafe(_KEY_BYTES)
        self[key] = agent
        return key

    def join(self, settings: Settings) -> Agent:
        """Return the second stream of the agent whose key is the setting `seat`.

        Raises:
            RequestError: INVALID_ARGUMENT for other settings beside `seat`; NOT_FOUND if no agent has this key.
        """
        refuse_unknown(settings, ("seat",), "JoinWorld")
        key = read_scalar(settings, "seat")
        agent = self.get(key) if isinstance(key, str) else None
        if agent is None:
            text = "no agent in this world has this seat: expected the property world.seat of an agent that has joined"
            raise RequestError(Code.NOT_FOUND, text)
        return _ActingStream(self, agent)

    def leave(self, agent: EnvAgent) -> None:
        """Forget an agent that has left."""
        if agent in self.values():
            del self[self.key_of(agent)]


class _ActingStream(Agent):
    """The second stream. Its Steps carry actions, each with the number of its episode, and are answered at once.

    Args:
        streams: Shows whether the agent is still in the world.
        agent: The agent that the actions are for.
    """

    def __init__(self, streams: ActingStreams, agent: EnvAgent) -> None:
        self._streams = streams
        self._pacer = streams.pacer
        self._agent = agent
        self._episode_uid = len(agent.actions) + 1
        shape = () if agent.lanes is None else (agent.lanes,)
        self.actions = {**agent.actions, self._episode_uid: Spec.number("episode", shape, np.int64)}
        self.observations = {1: Spec.number("timing", (2,), np.float64)}
        self._timing = np.zeros(2)

    def reset(self, settings: Settings, running: bool) -> None:
        """Raise FAILED_PRECONDITION: Resets belong on the agent's own stream."""
        raise RequestError(
            Code.FAILED_PRECONDITION, "this stream carries actions; send Reset on the agent's own stream"
        )

    async def begin(self) -> int:
        """Begin without an action."""
        self._agent.world.resets.end(self)  # no ResetWorld waits for it
        self._timing = np.full(2, self._pacer.now())
        return pb.RUNNING

    async def step(self, actions: Mapping[int, Array]) -> int:
        """Record an action for the episode whose number comes with it."""
        received = self._pacer.now()
        # The agent may have left meanwhile, and another client may have taken its place.
        if self._agent not in self._streams.values():
            raise RequestError(Code.FAILED_PRECONDITION, "the agent of this seat has left the world")
        self._agent.world.refuse_if_over()
        if actions:
            if self._episode_uid not in actions:
                text = "the Step lacks the action 'episode': expected the number of the episode that the action is for"
                raise RequestError(Code.INVALID_ARGUMENT, text)
            episodes = np.atleast_1d(actions[self._episode_uid]).tolist()
            own = {uid: array for uid, array in actions.items() if uid != self._episode_uid}
            self._pacer.act(self._agent, self._agent.decode(own), received, episodes)
        self._timing = np.array([received, self._pacer.now()])
        return pb.RUNNING

    def observe(self, uids: Sequence[int]) -> Mapping[int, Array]:
        """Return when the Step was received and when it was answered, in seconds of the world's clock."""
        return dict.fromkeys(uids, self._timing)

    @property
    def plays(self) -> bool:
        """False: the agent's own stream counts as the player."""
        return False

    def properties(self) -> PropertyTree:
        """Return the properties of the agent."""
        return self._agent.properties()

    async def answer_property(self, request: properties_pb2.PropertyRequest) -> properties_pb2.PropertyResponse:
        """Forward a request for a property."""
        return await self._agent.answer_property(request)

    def leave(self) -> None:
        """Do nothing: the agent stays in the world, and its last action goes on."""
