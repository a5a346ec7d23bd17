"""All instances of one server: each has a lobby, an environment that a clock steps, and its runs. No socket.

`Host.receive` takes datagrams, and what is to be sent goes to its ports. Environments and bots are called where they
live, as those of real-time worlds are.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from bridge.errors import PacketError, RequestError, SettingError, UnsupportedSpaceError
from bridge.perlert.guard import Address, Guard, GuardConfig, Outgoing
from bridge.perlert.lobby import Client, Lobby, LobbyConfig, SlotConfig
from bridge.perlert.protocol import packet, profile
from bridge.perlert.protocol.codec import TextCodec
from bridge.perlert.rollout import Rollout, RolloutConfig
from bridge.perlert.worlds import as_received, slots_of
from bridge.server.failure_log import FailureLog
from bridge.worlds.default_actions import default_action
from bridge.worlds.policies import Policy, as_policy, by_name
from bridge.worlds.realtime.joint_loop import Transition
from bridge.worlds.realtime.match import State
from bridge.worlds.realtime.multi_agent import Frame, Player, RealtimeMultiAgentWorld
from bridge.worlds.scheduling import Scheduler, Timer

__all__ = ["Host", "Instance"]

# What stands in an S5 besides header and observation: timestamp, step, reward, done, and the profile's counters.
_AROUND = 240
_TICK = 0.1
"""Seconds between two looks at what is due, while there is a client or a run."""
_MakeWorld: TypeAlias = Callable[..., Awaitable[RealtimeMultiAgentWorld]]


@dataclasses.dataclass
class _Agent:
    """An agent of the environment, and the slot that plays it."""

    name: str
    """The environment's name for it."""
    observations: TextCodec
    actions: TextCodec
    spaces: str
    """Its spaces, as they stand in an offer; empty: too long."""
    bot: Policy | None
    default_action: Any
    """What it does until its client's first valid action; None: the first that is allowed, or zeros."""
    player: Player | None = None
    """Acts for it, in a run that its client plays in."""


class Instance:
    """One environment with its lobby and its runs. `open` makes it ready.

    `make` makes the environment's world, given what stands in where no client acts, and again where its process has
    ended. `seed` is the first run's.
    """

    world: RealtimeMultiAgentWorld
    lobby: Lobby

    def __init__(
        self,
        header: packet.Header,
        make: _MakeWorld,
        host: Host,
        config: RolloutConfig | None = None,
        seed: int | None = None,
    ) -> None:
        self.header, self.host, self.config = header, host, config or RolloutConfig()
        self.runs = self.frames = self.failures = 0
        self._make, self._seed = make, seed
        self._agents: dict[str, _Agent] = {}
        """By the slots' keys."""
        self._begun = self._stopped = False
        self._current: Rollout | None = None
        self.rollouts: list[Rollout] = []
        """Those whose ports are open, the one that is on last."""
        self._timer: Timer | None = None
        self._log = FailureLog(host.scheduler)

    async def open(
        self,
        *,
        slots: Mapping[str, str] | Sequence[str] | None = None,
        bots: Any = None,
        default_action: Any = None,
        spectators: int = 0,
        lobby: LobbyConfig | None = None,
    ) -> None:
        """Make the environment, and the lobby for its agents, and publish it. Keywords as for `serve_perlert`.

        Raises:
            UnsupportedSpaceError: A space has no text form, or an observation may be longer than a datagram.
            SettingError: What is configured does not fit the environment.
            RequestError: The environment could not be made.
        """
        await self._make_world()
        try:
            kinds = slots_of(list(self.world.members), self.header.name, slots)
            keys = list(kinds)
            if isinstance(default_action, Mapping) and not default_action.keys() & kinds.keys():
                default_action = dict.fromkeys(keys, default_action)  # an action of a Dict space
            policies = by_name("bots", bots, keys, "slots")
            actions = by_name("default_action", default_action, keys, "slots")
            for key, name in zip(keys, self.world.members, strict=True):
                self._agents[key] = self._agent(name, policies.get(key), actions.get(key))
            if spectators < 0:
                raise SettingError(f"expected 0 spectators or more, got {spectators!r}")
            found = [SlotConfig(key, kind, bot=key in policies) for key, kind in kinds.items()]
            found += [SlotConfig(f"spectator{i}", "spectator", watches=keys[0]) for i in range(spectators)]
            self.lobby = Lobby(self.header, found, self.host.guard, config=lobby, offer=self._offer, moved=self._moved)
        except BaseException:
            await self.world.close()
            raise
        self.host.instances[self.header] = self

    async def _make_world(self) -> None:
        self.world = await self._make(self._stand_in)
        self.world.subscribe(self._on_frame)

    def _agent(self, name: str, policy: Any, action: Any) -> _Agent:
        """Return what reads, writes and stands in for an agent of the world."""
        spaces = self.world.members.spaces[name]
        observations = TextCodec(spaces[0], decimals=self.config.decimals)
        actions = TextCodec(spaces[1], named=False, decimals=None)
        header = len(str(self.header).encode())
        size = observations.max_bytes() + header + _AROUND
        if size > packet.MAX_MESSAGE:
            raise UnsupportedSpaceError(
                f"expected observations of {self.header} that fit into a datagram of {packet.MAX_MESSAGE} bytes, "
                f"got up to {size} bytes for {spaces[0]}; use fewer decimals (decimals=2), select or "
                "bound the elements with a wrapper (gymnasium.wrappers.TransformObservation), or serve it over grpc://"
            )
        offer = profile.spaces_text(*spaces)
        # Spaces too long for a message are left out; clients are given them otherwise.
        fits = len(offer.encode()) + header + 200 <= packet.MAX_MESSAGE
        bot = None if policy is None else as_policy("bots", policy, spaces[1])
        default = None if action is None else as_received(action, actions)
        return _Agent(name, observations, actions, offer if fits else "", bot, default)

    def _offer(self, token: str, seq: int, key: str) -> str:
        spaces = self._agents[self.lobby.slots[key].watches or key].spaces
        fps, decimals = self.config.fps, self.config.decimals
        return profile.offer_text(token, seq=seq, slot=key, fps=fps, decimals=decimals, spaces=spaces)

    def _stand_in(self, agent: Any, observation: Any, space: Any) -> Any:
        """Return what an agent does that no client plays, or whose client has not said. In the world's thread."""
        own = next(own for own in self._agents.values() if own.name == str(agent))
        if own.bot is not None and own.player is None:
            return own.bot(observation)
        return default_action(agent, observation, space) if own.default_action is None else own.default_action

    # Input and output

    def handle(self, message: packet.ClientMessage, sender: Address, size: int) -> None:
        """Take a message for the lobby."""
        self.send(self.lobby.handle(message, sender, size, self.host.now()))
        if not isinstance(message, packet.LobbyRequest) or sender in self.lobby.clients:
            self.tick()

    def send(self, out: Iterable[Outgoing], port: int | None = None) -> None:
        """Send datagrams from a run's port, or the lobby's."""
        for datagram, address in out:
            self.host.ports.send(port, datagram, address)

    def _act(self, key: str, text: str) -> None:
        """Take an action of a client; raises PacketError."""
        agent = self._agents[key]
        if agent.player is not None:
            agent.player.act(agent.actions.decode(text))

    def _moved(self, old: Address, client: Client | None) -> None:
        """Take note that a client has another address, or has left: then the server acts in its slot."""
        for run in self.rollouts:
            if client is not None:
                run.move(old, client.address, client.token)
            elif (left := run.leave(old)) is not None and run is self._current:
                self._release(self._agents[left])

    def _release(self, agent: _Agent) -> None:
        if agent.player is not None:
            agent.player.leave()
            agent.player = None

    # The run

    async def _begin(self) -> None:
        """Have the environment reset for the next run, in a new process if its own has ended."""
        try:
            if self.world.env.ended is not None:
                await self.world.close()
                await self._make_world()
            if self._stopped:
                await self.world.close()
                return
            seed, self._seed = self._seed, None
            self.world.begin(seed)
        except Exception as error:
            self._break_off(error.message if isinstance(error, RequestError) else repr(error))

    def _on_frame(self, frame: Frame) -> None:
        """Take what the environment did, and tell the clients."""
        try:
            if frame.error is not None:
                self._break_off(frame.error)
            elif self.lobby.state is State.STARTING:
                self._start(self._seen(frame))
            elif (run := self._current) is not None:
                self.frames += 1
                self.send(run.frame(self._seen(frame), self.host.now()), run.port)
        except Exception as error:  # observations with NaN, rewards without end: the environment's fault
            self._break_off(f"the environment's {type(error).__name__}: {error}")
        if self._current is None or not self._current.running:
            self.host.scheduler.call_soon(self.tick)

    def _break_off(self, reason: str) -> None:
        """End the run, or the start of one, by what the environment or a bot raised."""
        now = self.host.now()
        # The traceback is for the log; the clients are told its first line.
        text = reason.partition("\n")[0]
        if self.lobby.state is State.STARTING:
            self._begun = False
            self.send(self.lobby.start_failed(text, now))
        elif (run := self._current) is not None:
            self.send(self.lobby.say(text, now))
            self.send(run.end(now), run.port)
        else:
            return
        self.failures += 1
        self._log.add(str(self.header), reason)

    def _seen(self, frame: Frame) -> dict[str, Transition]:
        """Return what each slot's agent saw, its observation as text."""
        return {
            key: Transition(agent.observations.encode(told.observation), told.reward, told.terminated, told.truncated)
            for key, agent in self._agents.items()
            if (told := frame.transitions.get(agent.name)) is not None
        }

    def _start(self, first: Mapping[str, Transition]) -> None:
        """Open a port for the run; step 0 is the reset's observation."""
        now, port = self.host.now(), self.host.open_port()
        run = Rollout(self.header, port, self.host.guard, self._act, config=self.config, epoch=self.host.epoch)
        self._current, self.host.runs[port] = run, (self, run)
        self.rollouts.append(run)
        self.runs += 1
        self.send(self.lobby.started(port, now))
        self._let_in(run, now)
        self.send(run.frame(first, now), port)

    def _let_in(self, run: Rollout, now: float) -> None:
        """Let the clients into the run that is on that have been told of it."""
        for client in self.lobby.clients.values():
            player = client.player
            if client.port == run.port and player is not None and client.address not in run.players:
                run.join(player, now)
                if not player.watching:
                    agent = self._agents[player.key]
                    agent.player = self.world.enter(agent.name, f"agent:{client.tag}" if client.tag else "agent")

    def tick(self) -> None:
        """Do what is due in the lobby and the runs; again soon while there is a client or a run."""
        now = self.host.now()
        self.send(self.lobby.tick(now))
        if self.lobby.state is State.STARTING and not (self._begun or self._stopped):
            self._begun = True
            self.host.scheduler.start(self._begin(), lambda result, error: None)
        for run in list(self.rollouts):
            if run is self._current:
                self._let_in(run, now)
            self.send(run.tick(now), run.port)
            if run is self._current and not run.running:
                self._run_ended(now)
            if run.is_closed(now):
                self.rollouts.remove(run)
                del self.host.runs[run.port]
                self.host.ports.close_port(run.port)
        if self._timer is not None:
            self._timer.cancel()
        due = bool(self.rollouts or self.lobby.clients)
        self._timer = self.host.scheduler.call_later(_TICK, self.tick) if due else None

    def _run_ended(self, now: float) -> None:
        self._current, self._begun = None, False
        self.world.end()  # nobody is in it any more
        for agent in self._agents.values():
            self._release(agent)
        self.send(self.lobby.run_ended(now))

    def stop(self) -> None:
        """End the run that is on, with done=true for everybody, and say that the server goes."""
        now = self.host.now()
        self._stopped = True
        self.send(self.lobby.say("The server is going away.", now))
        if (run := self._current) is not None:
            self.send(run.end(now), run.port)

    async def close(self) -> None:
        """Do nothing more, and close the environment."""
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self.world.close()
        except RequestError as error:
            self._log.add(str(self.header), error.message)

    @property
    def running(self) -> bool:
        """Whether a run is on."""
        return self._current is not None

    def stats(self) -> dict[str, int]:
        """Return counters."""
        loop = self.world.loop
        return {
            "runs": self.runs,
            "frames": self.frames,
            "late_frames": loop.overruns + loop.dropped,
            "failures": self.failures,
            "clients": len(self.lobby.clients),
        }


class Host:
    """Several instances on one lobby port, and one clock, the scheduler's, to which `epoch` is added for the date.

    `ports` is a `ServerPorts`, or has its methods `send`, `open_port` and `close_port`.
    """

    def __init__(self, guard: GuardConfig | None, scheduler: Scheduler, ports: Any, epoch: float = 0.0) -> None:
        self.guard = Guard(guard)
        self.scheduler, self.ports, self.epoch = scheduler, ports, epoch
        self.now = scheduler.now
        self.instances: dict[packet.Header, Instance] = {}
        self.runs: dict[int, tuple[Instance, Rollout]] = {}
        """The rollouts whose ports are open, by port."""
        self.counts = self.guard.dropped
        self._recent: deque[int] = deque(maxlen=64)

    def open_port(self) -> int:
        """Open a rollout port that none of the last runs had: clients tell runs apart by it."""
        refused: list[int] = []
        while (port := int(self.ports.open_port())) in self._recent and len(refused) < 8:
            refused.append(port)
        for other in refused:
            self.ports.close_port(other)
        self._recent.append(port)
        return port

    def receive(self, port: int | None, datagram: bytes, sender: Address) -> None:
        """Take a datagram that came to the lobby's port (None) or a rollout's; whatever it holds, nothing is raised."""
        now = self.now()
        if port is not None:
            if port in self.runs:
                instance, run = self.runs[port]
                instance.send(run.receive(datagram, sender, now), port)
            else:
                self.counts["closed port"] += 1
            return
        if not self.guard.heard(sender, datagram, now):
            return
        try:
            message = packet.parse_client(datagram)
        except PacketError:
            self.counts["malformed"] += 1
            return
        if (known := self.instances.get(message.header)) is not None:
            known.handle(message, sender, len(datagram))
            return
        self.counts["no such instance"] += 1
        if isinstance(message, packet.LobbyRequest):
            names = ", ".join(map(str, list(self.instances)[:8]))
            text = packet.Message(message.header, f"There is no {message.header} here; there is {names}")
            told = packet.format_message(text)
            if self.guard.answer(sender, len(told), len(datagram), now):
                self.ports.send(None, told, sender)
