"""A remote world of several agents as a PettingZoo `ParallelEnv`, a stream an agent (extra `pettingzoo`)."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bridge.client.env import remote_metadata
from bridge.client.options import RemoteKeywords, RemoteOptions
from bridge.client.pool_owner import PoolOwner
from bridge.client.slots.pool import Awaited
from bridge.client.slots.resets import reset_settings
from bridge.client.world.events import Joined, Replied, StepAnswered
from bridge.client.world.remote import Remote
from bridge.client.world.step_reader import Transition
from bridge.encoding.tensors import pack_tensor
from bridge.errors import (
    Code,
    InvalidActionError,
    RefusedError,
    RemoteError,
    RemoteTimeoutError,
    ResetNeededError,
    SettingError,
)
from bridge.extras import install_command
from bridge.keywords import grouped
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.server_wait import until_up
from bridge.transport.credentials import TLS

try:
    from pettingzoo import ParallelEnv
except ImportError as error:
    raise ImportError(f"a remote world of several agents needs PettingZoo: {install_command('pettingzoo')}") from error

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["RemoteParallelEnv", "make_parallel_remote"]


class RemoteParallelEnv(PoolOwner, ParallelEnv):  # type: ignore[misc]
    """All agents of one remote world, as if the environment were local; each has a stream of the one connection.

    Agents go by their names as text. All agents' members must be free: this environment takes them all.

    A real-time world goes on between the steps: a step leaves its actions and returns at once with what has happened
    since the last one (`wait="next_frame"`: with the next frame). Agents' connections are asked one after the other, so
    a frame may pass between two of them; `infos[agent]["latency"]["frame"]` tells it.

    Args:
        url: The server's URL; `?world=NAME` joins a world that exists, else one is made.
        keywords: Those of `make_parallel_remote`.

    Raises:
        ConnectError: Nobody listens there.
        RefusedError: The server refuses, or a member is taken.
        SettingError: The server has no world of several agents.
    """

    _maker: Remote | None = None
    """The one whose world it is, if one was made; None: none has joined since this process has the environment."""

    @grouped(RemoteOptions, tls=TLS)
    def __init__(self, url: str, **keywords: Any) -> None:
        options = RemoteOptions(**keywords)
        self._started = False
        self._wait_for_server = options.wait_for_server
        self._own_pool(options.timeout)
        self._world_request = options.request(url)
        self._url = self._world_request.address.url
        self._remotes: dict[str, Remote] = {}
        self.agents: list[str] = []
        try:
            with self._conflicts:  # else the thread that works between calls takes answers
                self._connect()
        except BaseException:  # KeyboardInterrupt too: without an object there is nobody to close the connections
            self._disconnect(0.5)
            raise
        world_info = {name: remote.known_info() for name, remote in self._remotes.items()}
        self.possible_agents = list(world_info)
        self.observation_spaces = {name: fact.observation_space for name, fact in world_info.items()}
        self.action_spaces = {name: fact.action_space for name, fact in world_info.items()}
        first = next(iter(world_info.values()))
        self.metadata = remote_metadata(first)
        self.render_mode = options.render_mode or first.render_mode

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._started, self._maker, self.agents = False, None, []

    def _connect(self) -> None:
        """Join as the first free agent, ask it for the others' names, and join as them."""
        # Together, because all agents have to reach the world that the first of them makes.
        first = Remote(self._world_request, self._pool.poller, together=True)
        until_up(lambda: self._pool.join(first), self._wait_for_server)
        try:
            name = self._read_property(first, "world.agent", "to a question", encoded=False)
            names = self._read_property(first, "world.agents", "to a question", encoded=True)
        except BaseException as error:
            first.close(0.5)
            unknown = (Code.NOT_FOUND, Code.UNIMPLEMENTED, Code.PERMISSION_DENIED)
            # A world of one agent has no such property, and another server none at all: the user took the wrong
            # function.
            if isinstance(error, RefusedError) and error.code in unknown:
                raise SettingError(
                    f"{self._url} is no world of several agents (it has no property world.agents); use make_remote"
                ) from None
            raise
        # The others join the world that the first one has made, with nothing to make it of.
        address = dataclasses.replace(self._world_request.address, world=first.session.world_name, settings=())
        place = dataclasses.replace(self._world_request, address=address, render_mode=None, env_kwargs={})
        self._remotes = {
            agent: first
            if agent == name
            else Remote(dataclasses.replace(place, agent=agent), self._pool.poller, together=True)
            for agent in names
        }
        # Before the others join: if one of them fails, the world is destroyed.
        self._maker = first
        others = {agent: remote for agent, remote in self._remotes.items() if remote is not first}
        for remote in others.values():
            remote.open()
        self._gather(others, Joined, "to join a world")

    def _reply(self, remote: Remote, request: pb.EnvironmentRequest, purpose: str) -> pb.EnvironmentResponse:
        remote.ask(request)
        return self._gather({"": remote}, Replied, purpose)[""].message

    def _gather(
        self, remotes: Mapping[str, Remote], kind: type[Awaited], purpose: str, *, tolerate: int | None = None
    ) -> dict[str, Awaited]:
        """Wait for an answer from each of some agents' remotes; one refused with the code `tolerate` is left out."""
        try:
            found = self._pool.wait_for_all(remotes.values(), kind, purpose, tolerate=tolerate)
        except RemoteError as error:
            # A refused Step changes nothing (D-2): the episode goes on. Where a connection was lost, it does not; and
            # answers that come after a timeout would be taken for those to the next Steps. New connections have none.
            if isinstance(error, RemoteTimeoutError) or not all(remote.connected for remote in remotes.values()):
                self._disconnect(0.0)
            raise
        return {name: found[remote] for name, remote in remotes.items() if remote in found}

    def observation_space(self, agent: str) -> Any:
        """Return an agent's observation space, always the same object."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> Any:
        """Return an agent's action space, always the same object."""
        return self.action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Begin an episode of all agents.

        Args:
            seed: For the remote environment: an integer that is not negative.
            options: For the remote environment's reset; what the values codec carries.

        Returns:
            Observations and infos by agent.
        """
        with self._conflicts:
            self._require_open()
            settings = reset_settings(seed, options)
            # One lost agent is enough: its place in the world may be another's by now.
            if not all(remote.connected for remote in self._remotes.values()):
                self._disconnect(0.0)
                self._connect()
            first = self.possible_agents[0]
            realtime = self._remotes[first].known_info().fps is not None
            if settings and realtime:  # each has a stream of its own: nobody knows which Reset arrives first
                settings["together"] = pack_tensor(secrets.randbits(62))
            self._remotes[first].session.write_reset(settings)  # raises where it is too large to be sent
            self._started = False
            for name, remote in self._remotes.items():
                # In lock step one Reset with the seed is enough: the environment is reset once for all agents.
                remote.begin(settings if realtime or name == first else {})
            # So the server refuses the first Step of an agent whom the environment's reset has left out.
            answers = self._gather(self._remotes, StepAnswered, "to reset", tolerate=Code.FAILED_PRECONDITION)
            self._started = True
            self.agents = [name for name in self.possible_agents if name in answers]
            read = {name: self._transition(name, answers[name]) for name in self.agents}
            return {name: t[0] for name, t in read.items()}, {name: t[4] for name, t in read.items()}

    def step(
        self, actions: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        """Step all live agents.

        Args:
            actions: An action for each of `agents`.

        Returns:
            Observations, rewards, terminations, truncations and infos by agent.

        Raises:
            InvalidActionError: A live agent has no action, or one outside of its space; nothing was sent.
            ResetNeededError: No episode is running.
        """
        with self._conflicts:
            self._require_open()
            if not self._started:
                raise ResetNeededError("expected reset() before step(): no episode is running")
            missing = [name for name in self.agents if name not in actions]
            if missing:
                raise InvalidActionError(f"expected an action for each of {self.agents}, got none for {missing}")
            # All are checked before the first is sent: else one wrong action would leave the others' on their way.
            packed = {name: self._remotes[name].world.write_action(actions[name]) for name in self.agents}
            # They share a connection, so all requests leave in one piece.
            with self._pool.poller.corked():
                for name, request in packed.items():
                    self._remotes[name].send_step(request)
            answers = self._gather({name: self._remotes[name] for name in packed}, StepAnswered, "to a step")
            read = {name: self._transition(name, answers[name]) for name in packed}
            self.agents = [name for name, t in read.items() if not (t[2] or t[3])]
            parts: tuple[dict[str, Any], ...] = tuple({name: t[i] for name, t in read.items()} for i in range(5))
            return parts[0], parts[1], parts[2], parts[3], parts[4]

    def _transition(self, name: str, answer: StepAnswered) -> Transition:
        return answer.reader.read(answer.message, self._remotes[name].now())

    def _asked(self) -> Remote:
        self._require_open()
        return self._require_connection(self._remotes[self.possible_agents[0]])

    def state(self) -> Any:
        """Return the environment's global state, where it has one."""
        return self.call("state")

    def _disconnect(self, timeout: float) -> None:
        self._started = False
        deadline = time.monotonic() + timeout
        others = [remote for remote in self._remotes.values() if remote is not self._maker]
        self._pool.close(others, timeout)
        if self._maker is not None:  # last: it destroys the world
            self._pool.close([self._maker], max(0.0, deadline - time.monotonic()))

    def __repr__(self) -> str:
        return f"<RemoteParallelEnv {self._url}>"


@grouped(RemoteOptions, tls=TLS)
def make_parallel_remote(url: str, **keywords: Unpack[RemoteKeywords]) -> RemoteParallelEnv:
    """Connect to a remote world of several agents as all of them.

    Args:
        url: `grpc://HOST:PORT`, or with `?world=NAME` for a world that exists.
        keywords: Those of `bridge.client.options.RemoteOptions`, which the signature lists.

    Raises:
        AddressError, ConnectError, RefusedError, RemoteTimeoutError: As `RemoteParallelEnv`.
    """
    return RemoteParallelEnv(url, **keywords)
