"""A remote world of several agents as a PettingZoo `ParallelEnv`, with a stream per agent (extra `pettingzoo`)."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bridge.core.back_off import until_up
from bridge.core.client.envs.env import remote_metadata
from bridge.core.client.envs.pool_owner import PoolOwner
from bridge.core.client.options import RemoteOptions
from bridge.core.client.slots.pool import Awaited
from bridge.core.client.slots.resets import reset_settings
from bridge.core.client.world.extensions import property_write
from bridge.core.client.world.remote import Remote
from bridge.core.client.world.session_states import Joined, Replied, StepAnswered
from bridge.core.client.world.steps import Transition
from bridge.core.encoding.names import CLIENT_KEY
from bridge.core.encoding.space_json import space_from_json
from bridge.core.encoding.tensors import pack_tensor
from bridge.core.extras import imported_from
from bridge.core.keywords import grouped
from bridge.core.transport.credentials import TLS
from bridge.errors import (
    Code,
    InvalidActionError,
    PeerError,
    RefusedError,
    RemoteError,
    RemoteTimeoutError,
    ResetNeededError,
    SettingError,
)
from bridge.pb import dm_env_rpc_pb2 as pb

with imported_from("a remote world of several agents needs PettingZoo", "pettingzoo"):
    from pettingzoo import ParallelEnv

if TYPE_CHECKING:
    from bridge.core.client.messages import MessageReply
    from bridge.core.encoding.message_form import MessageForm

__all__ = ["RemoteParallelEnv"]


_PARTS = ("observation", "reward", "terminated", "truncated", "info")


@dataclasses.dataclass
class _Joint:
    """The results of a reset or a step for all agents."""

    told: dict[str, Transition] = dataclasses.field(default_factory=dict)
    """The answer of each agent."""
    missing: dict[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """For agents whose answers have gaps: the parts that the environment did not return (`StepInfo.missing`)."""
    alive: list[str] = dataclasses.field(default_factory=list)
    """The agents that are alive now; empty: as before, without those that ended."""

    def parts(
        self,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        """Return observations, rewards, terminations, truncations and infos by agent."""
        found: list[dict[str, Any]] = [
            {name: told[place] for name, told in self.told.items()} for place in range(len(_PARTS))
        ]
        for name, missing in self.missing.items():
            for part, by_agent in zip(_PARTS, found, strict=True):
                if part in missing:
                    del by_agent[name]
            if "end" in missing and name in found[3]:
                found[3][name] = False  # as the environment says: it left the agent out without an end
        return found[0], found[1], found[2], found[3], found[4]


class RemoteParallelEnv(PoolOwner, ParallelEnv):  # type: ignore[misc]
    """All agents of one remote world, as if the environment were local. Each has a stream of the one connection.

    Agents are identified by their names as text. All agents' members must be free: this environment takes them all, so
    that agents may enter, leave and come back during an episode. An episode without agents is over.

    A real-time world continues between the steps: a step sends its actions and returns at once with the results since
    the last one (with `wait="next_frame"`, with the next frame). The agents' answers are read one after the other, so a
    frame may pass between two of them; `infos[agent]["latency"]["frame"]` shows it.

    Args:
        url: The server's URL. `?world=NAME` joins an existing world, otherwise one is created.
        keywords: The keyword arguments of `make_parallel_remote`.

    Raises:
        ConnectError: No server listens there.
        RefusedError: The server refuses, or a member is not free.
        SettingError: The server has no world of several agents.
    """

    _remedy = (
        "the remote environment has none of that name, as far as it is known here: get_attr, set_attr and call ask "
        "where it runs"
    )
    # As locally: a ParallelEnv is no wrapper, so `set_attr` sets the environment's own attributes, as PettingZoo's
    # tests do.
    _makes_new = True
    _introduced = False
    """True if the server knows that the agents belong to one client."""
    _maker: Remote | None = None
    """The remote that created the world, None: none was, or not since this process has the object."""

    @grouped(RemoteOptions, tls=TLS)
    def __init__(self, url: str, **keywords: Any) -> None:
        options = RemoteOptions(**keywords)
        self._started = False
        self._wait_for_server = options.wait_for_server
        self._own_pool(options.timeout)
        self._world_request = dataclasses.replace(options.request(url), names=True)
        self._url = self._world_request.address.url
        self._own_remotes({})
        self._state_space: Any = None
        self.agents: list[str] = []
        try:
            with self._conflicts:  # otherwise the thread that works between calls takes answers
                self._connect()
        except BaseException:  # KeyboardInterrupt too: without an object nothing would close the connections
            self._disconnect(0.5)
            raise
        world_info = {name: remote.known_info() for name, remote in self._remotes.items()}
        self.possible_agents = list(world_info)
        self.observation_spaces = {name: fact.observation_space for name, fact in world_info.items()}
        self.action_spaces = {name: fact.action_space for name, fact in world_info.items()}
        if self._state_space is not None:
            self.state_space = self._state_space
            """The space of the result of `state`; only set if the environment has one."""
        first = next(iter(world_info.values()))
        self.metadata = remote_metadata(first)
        self.render_mode = options.render_mode or first.render_mode

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._started, self._maker, self.agents = False, None, []

    def _connect(self) -> None:
        """Join as the first free agent, read the names of the others, and join as them."""
        self._introduced = False
        # `together`, because all agents must reach the server with the world that the first of them creates.
        first = Remote(self._world_request, self._pool.poller, together=True)
        until_up(lambda: self._pool.join(first), self._wait_for_server)
        try:
            name = self._read_property(first, "world.agent", "to a question", encoded=False)
            names = self._read_property(first, "world.agents", "to a question", encoded=True)
        except BaseException as error:
            first.close(0.5)
            unknown = (Code.NOT_FOUND, Code.UNIMPLEMENTED, Code.PERMISSION_DENIED)
            # A world of one agent has no such property, and neither have other packages' servers: the user called the
            # wrong function.
            if isinstance(error, RefusedError) and error.code in unknown:
                raise SettingError(
                    f"{self._url} is no world of several agents (it has no property world.agents); use make_remote"
                ) from None
            raise
        self._state_space = self._read_state_space(first)
        # The others join the world that the first one created, without settings.
        address = dataclasses.replace(self._world_request.address, world=first.world_name, settings=())
        place = dataclasses.replace(self._world_request, address=address, render_mode=None, env_kwargs={}, names=False)
        self._remotes = {
            agent: first
            if agent == name
            else Remote(dataclasses.replace(place, agent=agent), self._pool.poller, together=True)
            for agent in names
        }
        # Before the others join, so that the world is destroyed if one of them fails.
        self._maker = first
        others = {agent: remote for agent, remote in self._remotes.items() if remote is not first}
        for remote in others.values():
            remote.open()
        self._gather(others, Joined, "to join a world")

    def _read_state_space(self, first: Remote) -> Any:
        """Return the space of the environment's global state; None: it has none, or an older server does not tell."""
        try:
            text = self._read_property(first, "world.state_space", "to a question", encoded=False)
        except RefusedError as error:
            if error.code != Code.NOT_FOUND:
                raise
            return None
        return space_from_json(text) if text else None

    def _reply(self, remote: Remote, request: pb.EnvironmentRequest, purpose: str) -> pb.EnvironmentResponse:
        remote.ask(request)
        return self._gather({"": remote}, Replied, purpose)[""].message

    def _gather(
        self, remotes: Mapping[str, Remote], kind: type[Awaited], purpose: str, *, tolerate: int | None = None
    ) -> dict[str, Awaited]:
        """Wait for an answer for each of some agents. One that is refused with the code `tolerate` is left out."""
        try:
            found = self._pool.wait_for_all(remotes.values(), kind, purpose, tolerate=tolerate)
        except RemoteError as error:
            # A refused Step changes nothing (D-2), so the episode continues. After a lost connection it cannot; and
            # after a timeout, late answers would be taken for those to the next Steps. New connections have none.
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
            seed: For the remote environment: a non-negative integer.
            options: For the remote environment's reset; values that the values codec can encode.

        Returns:
            Observations and infos by agent.
        """
        with self._conflicts:
            self._require_open()
            settings = reset_settings(seed, options)
            # If one agent was lost, all connect again: another client may have its place in the world by now.
            if not all(remote.connected for remote in self._remotes.values()):
                self._disconnect(0.0)
                self._connect()
            first = self.possible_agents[0]
            realtime = self._remotes[first].known_info().fps is not None
            if settings and realtime:  # each agent has a stream of its own, so the order of the Resets is not known
                settings["together"] = pack_tensor(secrets.randbits(62))
            self._remotes[first].check_reset(settings)  # raises if the settings are too large to be sent
            self._started = False
            for name, remote in self._remotes.items():
                # In lock-step one Reset with the seed is enough: the environment is reset once for all agents.
                remote.begin(settings if realtime or name == first else {})
            return self._first_answers("to reset")

    def _first_answers(self, purpose: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Return observations and infos of the first Steps of an episode, which were sent for all agents."""
        # The server refuses the Step of an agent that the environment has left out.
        answers = self._gather(self._remotes, StepAnswered, purpose, tolerate=Code.FAILED_PRECONDITION)
        self._started = True
        read = _Joint()
        for name, answer in answers.items():
            self._read(name, answer, read)
        self.agents = read.alive or list(answers)
        observations, _, _, _, infos = read.parts()
        return observations, infos

    def send_message(self, form: MessageForm, request: bytes) -> MessageReply:
        """Send a message of a feature, or of another package. The server must accept it (docs/plugins.md).

        Args:
            form: The form of the message.
            request: The bytes of the request.

        Returns:
            The answer; and, if the environment was put into another situation, observations and infos by agent, as
            `reset` returns them: the episode continues from there, and `step` is possible.

        Raises:
            RefusedError: As `RemoteEnv.send_message`; the episode continues.
        """
        from bridge.core.client.messages import (
            MessageAnswer,
            MessageReply,
            MessageTarget,
            message_request,
            read_message,
        )

        target = MessageTarget(self._url, (0,), (0,))
        with self._conflicts:
            remote = self._asked()
            reply = self._reply(remote, message_request(form, request, target, ()), f"to a message {form.name}")
            data, step = read_message(form, reply, remote.url)
            answers = [MessageAnswer(target, data, step is not None)]
            if step is None:
                return MessageReply(answers)
            # The sequences of all agents have ended. Each agent that is alive there begins a new one by its next Step.
            self._started = False
            for each in self._remotes.values():
                each.begin(reset=False)
            return MessageReply(answers, self._first_answers(f"after a message {form.name}"))

    def step(
        self, actions: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        """Step all live agents.

        Args:
            actions: An action for each of `agents`.

        Returns:
            Observations, rewards, terminations, truncations and infos by agent, for those that acted or are alive now,
            without the parts that the environment did not return. An agent that entered in this step is in `agents`
            from now on.

        Raises:
            InvalidActionError: A live agent has no action, or one outside its space; nothing was sent.
            RefusedError: An agent entered that the server does not let this client play.
            ResetNeededError: No episode is running.
        """
        with self._conflicts:
            self._require_open()
            if not self._started:
                raise ResetNeededError("expected reset() before step(): no episode is running")
            missing = [name for name in self.agents if name not in actions]
            if missing:
                raise InvalidActionError(f"expected an action for each of {self.agents}, got none for {missing}")
            # All are checked before the first is sent: otherwise one wrong action would leave the others' Steps in
            # flight.
            packed = {name: self._remotes[name].writer.write_action(actions[name]) for name in self.agents}
            # They share a connection, so all requests are sent in one piece.
            with self._pool.corked():
                for name, request in packed.items():
                    self._remotes[name].send_step(request)
            answers = self._gather({name: self._remotes[name] for name in packed}, StepAnswered, "to a step")
            read = _Joint()
            for name in packed:
                self._read(name, answers[name], read)
            playing = [name for name, told in read.told.items() if not (told[2] or told[3])]
            agents = read.alive or playing
            # Agents that entered, and agents that ended and are alive again.
            entering = {name: self._remotes[name] for name in agents if name not in playing}
            if entering:
                self._enter(entering, read)
            self.agents = agents
            return read.parts()

    def _enter(self, entering: Mapping[str, Remote], read: _Joint) -> None:
        """Join the sequence with the agents that entered, and read their results of that step."""
        # The step was made: if one of the agents cannot enter, the episode cannot continue as it would locally.
        self._started = False
        for remote in entering.values():
            remote.begin(reset=False)
        answers = self._gather(entering, StepAnswered, "to let agents enter")
        for name, answer in answers.items():
            # An agent that acted has its results of that step already.
            self._read(name, answer, _Joint() if name in read.told else read)
        self._started = True

    def _read(self, name: str, answer: StepAnswered, joint: _Joint) -> None:
        """Add an agent's answer to the results of a joint step."""
        told = answer.reader.read(answer.message, self._remotes[name].now())
        agents, missing = answer.reader.take_joint()
        joint.told[name] = told
        if missing:
            joint.missing[name] = missing
        if agents:
            unknown = [agent for agent in agents if agent not in self._remotes]
            if unknown:
                raise PeerError(self._url, f"it names agents that the world does not have: {unknown!r:.80}")
            joint.alive = list(agents)

    def _asked(self) -> Remote:
        self._require_open()
        remote = self._require_connection(self._remotes[self.possible_agents[0]])
        if not self._introduced:
            self._introduce()
        return remote

    def _introduce(self) -> None:
        """Tell the server that all agents belong to this client, which has the world alone if no other is in it."""
        # Each agent has a stream, or over WebSocket and through a gateway a connection: the server sees separate
        # clients.
        request = property_write(CLIENT_KEY, pack_tensor(secrets.token_hex(16)))
        remotes = {name: remote for name, remote in self._remotes.items() if remote.connected}
        for remote in remotes.values():
            remote.ask(request)
        # Older servers do not know the property, and let all clients call.
        self._gather(remotes, Replied, "to a question", tolerate=Code.NOT_FOUND)
        self._introduced = True

    def state(self) -> Any:
        """Return the environment's global state, if it has one."""
        return self.call("state")

    def _disconnect(self, timeout: float) -> None:
        self._started = False
        deadline = time.monotonic() + timeout
        others = [remote for remote in self._remotes.values() if remote is not self._maker]
        self._pool.close(others, timeout)
        if self._maker is not None:  # last, because it destroys the world
            self._pool.close([self._maker], max(0.0, deadline - time.monotonic()))

    def __repr__(self) -> str:
        return f"<RemoteParallelEnv {self._url}>"
