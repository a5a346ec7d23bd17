"""All instances of one server: each has a lobby, an environment that a clock steps, and its runs. No socket.

`Host.receive` takes datagrams, and everything that is to be sent goes to the function `send`. What waits, waits by the
scheduler's timers; environments and bots are called where they live, as those of real-time worlds are.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from bridge.errors import PacketError, RequestError, SettingError, UnsupportedSpaceError
from bridge.perlert.guard import Address, Guard, GuardConfig, Outgoing
from bridge.perlert.lobby import Client, Lobby, LobbyConfig, SlotConfig
from bridge.perlert.lobby import State as LobbyState
from bridge.perlert.protocol import packet, profile
from bridge.perlert.protocol.codec import TextCodec
from bridge.perlert.rollout import Player as RunPlayer
from bridge.perlert.rollout import Result, Rollout, RolloutConfig
from bridge.perlert.rollout import State as RunState
from bridge.perlert.worlds import StandIns, by_slot, slots_of
from bridge.server.failure_log import FailureLog
from bridge.worlds.realtime.multi_agent import Frame, Player, RealtimeMultiAgentWorld
from bridge.worlds.scheduling import Scheduler, Timer

__all__ = ["Host", "Instance", "InstanceConfig"]


# What stands in an S5 besides header and observation: timestamp, step, reward, done, and the profile's counters.
_AROUND = 240
_MakeWorld: TypeAlias = Callable[[StandIns | None], Awaitable[RealtimeMultiAgentWorld]]


@dataclasses.dataclass(frozen=True)
class InstanceConfig:
    """How instances run; see `serve_perlert` for what each is."""

    slots: Mapping[str, str] | Sequence[str] | None = None
    bots: Any = None
    default_action: Any = None
    spectators: int = 0
    lobby: LobbyConfig = dataclasses.field(default_factory=LobbyConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)


@dataclasses.dataclass(frozen=True)
class _Texts:
    """What reads and writes the texts of a slot."""

    observations: TextCodec
    actions: TextCodec
    offer: str
    """Its spaces, as they stand in an offer; empty: too long."""


class Instance:
    """One environment with its lobby and its runs. `open` makes it ready.

    Args:
        header: Its name and number.
        make: Makes the environment's world, again where its process has ended.
        host: What it belongs to.
        config: How it runs.
        kind: The kind of the one agent of a Gymnasium environment.
        seed: Of the first run.
    """

    world: RealtimeMultiAgentWorld
    lobby: Lobby

    def __init__(
        self,
        header: packet.Header,
        make: _MakeWorld,
        host: Host,
        *,
        config: InstanceConfig | None = None,
        kind: str = "agent",
        seed: int | None = None,
    ) -> None:
        self.header, self.host, self.config = header, host, config or InstanceConfig()
        self.runs = self.frames = self.failures = 0
        self._kind, self._seed = kind, seed
        self._stand_ins = StandIns()
        plain = self.config.bots is None and self.config.default_action is None
        self._make = partial(make, None if plain else self._stand_ins)
        self._begun = self._stopped = False
        self._current: Rollout | None = None
        self.rollouts: list[Rollout] = []
        """Those whose ports are open, the one that is on last."""
        self._timer: Timer | None = None
        self._log = FailureLog(host.scheduler)

    async def open(self) -> None:
        """Make the environment, and the lobby for its agents.

        Raises:
            UnsupportedSpaceError: A space has no text form, or an observation may be longer than a datagram.
            SettingError: What is configured does not fit the environment.
            RequestError: The environment could not be made.
        """
        config = self.config
        self.world = await self._make()
        try:
            agents = slots_of(list(self.world.members), self._kind, config.slots)
            self._names = dict(zip(agents, self.world.members, strict=True))
            bots, actions = by_slot("bots", config.bots, list(agents)), config.default_action
            if isinstance(actions, Mapping) and not set(actions) & set(agents):
                actions = dict.fromkeys(agents, actions)  # an action of a Dict space
            for key, policy in bots.items():
                self._stand_ins.add_bot(self._names[key], policy, self._spaces(key)[1])
            for key, action in by_slot("default_action", actions, list(agents)).items():
                self._stand_ins.add_action(self._names[key], action, self._spaces(key)[1])
            if config.spectators < 0:
                raise SettingError(f"expected 0 spectators or more, got {config.spectators!r}")
            self._texts = {key: self._prepare(key) for key in agents}
            slots = [SlotConfig(key, kind, bot=key in bots) for key, kind in agents.items()]
            first = slots[0].key
            slots += [SlotConfig(f"spectator{i}", "spectator", watches=first) for i in range(config.spectators)]
            self.lobby = Lobby(
                self.header,
                slots,
                self.host.guard,
                config=config.lobby,
                offer=self._offer,
                moved=self._moved,
            )
        except BaseException:
            await self.world.close()
            raise
        self._enter()

    def _enter(self) -> None:
        """Take all agents of the world."""
        self._players: dict[str, Player] = {key: self.world.enter(name) for key, name in self._names.items()}
        self.world.subscribe(self._on_frame)

    def _spaces(self, key: str) -> tuple[Any, Any]:
        return self.world.members.spaces[self._names[key]]

    def _prepare(self, key: str) -> _Texts:
        """Make what reads and writes the texts of a slot."""
        spaces = self._spaces(key)
        observations = TextCodec(spaces[0], decimals=self.config.rollout.decimals)
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
        return _Texts(observations, TextCodec(spaces[1], named=False, decimals=None), offer if fits else "")

    def _offer(self, token: str, seq: int, key: str) -> str:
        spaces = self._texts[self.lobby.slots[key].watches or key].offer
        config = self.config.rollout
        return profile.offer_text(token, seq=seq, slot=key, fps=config.fps, decimals=config.decimals, spaces=spaces)

    # Input

    def handle(self, message: packet.ClientMessage, sender: Address, size: int) -> None:
        """Take a message for the lobby."""
        self._send(self.lobby.handle(message, sender, size, self.host.now()))
        if not isinstance(message, packet.LobbyRequest) or sender in self.lobby.clients:
            self.tick()

    def receive(self, run: Rollout, datagram: bytes, sender: Address) -> None:
        """Take a datagram that came to a run's port."""
        self._send(run.receive(datagram, sender, self.host.now()), run.port)
        if run.state is not RunState.RUNNING:
            self.tick()

    def _moved(self, old: Address, client: Client | None) -> None:
        """Take note that a client has another address, or has left: then the server acts in its slot."""
        for run in self.rollouts:
            if client is not None:
                run.move(old, client.address, client.token)
            elif (left := run.leave(old)) is not None:
                self._players[left].leave()
                self._players[left] = self.world.enter(self._names[left])
                self._note_taken(run)

    def _note_taken(self, run: Rollout) -> None:
        self._stand_ins.taken = frozenset(self._names[key] for key in run.taken())

    def _send(self, out: Sequence[Outgoing], port: int | None = None) -> None:
        for datagram, address in out:
            self.host.send(port, datagram, address)

    def _act(self, key: str, text: str) -> None:
        """Take an action of a client; raises PacketError."""
        client = next((client for client in self.lobby.clients.values() if client.key == key), None)
        action = self._texts[key].actions.decode(text)
        self._players[key].act(action, by=f"agent:{client.tag}" if client is not None and client.tag else "agent")

    # The run

    async def _begin(self) -> None:
        """Have the environment reset for the next run, in a new process if its own has ended."""
        if self.world.env.ended is not None:
            await self.world.close()
            self.world = await self._make()
            if self._stopped:
                await self.world.close()
                return
            self._enter()
        seed, self._seed = self._seed, None
        self.world.begin(seed)

    def _begin_failed(self, result: None, error: BaseException | None) -> None:
        if error is not None:
            self._break_off(error.message if isinstance(error, RequestError) else repr(error))
            self.host.scheduler.call_soon(self.tick)

    def _on_frame(self, frame: Frame) -> None:
        """Take what the environment did, and tell the clients."""
        starts = self.lobby.state is LobbyState.STARTING
        if frame.number == 0 and frame.error is None and not starts:
            return  # of a run that was given up
        try:
            if frame.error is not None:
                self._break_off(frame.error)
            elif starts:
                self._start(frame)
            elif (run := self._current) is not None:
                self.frames += 1
                self._send(run.frame(self._results(frame), self.host.now()), run.port)
                self._note_taken(run)
        except Exception as error:  # observations with NaN, rewards without end: the environment's fault
            self._break_off(f"the environment's {type(error).__name__}: {error}")
        self.host.scheduler.call_soon(self.tick)

    def _break_off(self, reason: str) -> None:
        """End the run, or the start of one, by what the environment or a bot raised."""
        now = self.host.now()
        # The traceback is for the log; the clients are told its first line.
        text = reason.partition("\n")[0]
        if self.lobby.state is LobbyState.STARTING:
            self._send(self.lobby.start_failed(text, now))
        elif (run := self._current) is not None:
            self._send(self.lobby.say(text, now))
            self._send(run.end(now), run.port)
        else:
            return
        self.failures += 1
        self._begun = False
        self._log.add(str(self.header), reason)

    def _results(self, frame: Frame) -> dict[str, Result]:
        return {
            key: Result(
                self._texts[key].observations.encode(told.observation), told.reward, told.terminated, told.truncated
            )
            for key, name in self._names.items()
            if (told := frame.transitions.get(name)) is not None
        }

    def _start(self, frame: Frame) -> None:
        """Open a port for the run; step 0 is the reset's observation."""
        first, now = self._results(frame), self.host.now()
        port = self.host.open_port()
        self._current = run = Rollout(
            self.header, port, self.host.guard, self._act, config=self.config.rollout, epoch=self.host.epoch, now=now
        )
        self.rollouts.append(run)
        self.host.runs[port] = self, run
        self.runs += 1
        self._send(self.lobby.started(port, now))
        for client in self.lobby.clients.values():
            if client.port == port:
                self._join(run, client, now)
        self._note_taken(run)
        self._send(run.frame(first, now), port)
        self._send(run.end(now, [key for key in self._names if key not in first], truncated=False), port)

    def _join(self, run: Rollout, client: Client, now: float) -> None:
        watches = self.lobby.slots[client.key].watches
        key = watches or client.key
        run.join(RunPlayer(client.address, key, client.token, watches is not None, client.action_seq), now)

    # Time

    def tick(self) -> None:
        """Do what is due in the lobby and the runs, and see when there is more."""
        now = self.host.now()
        self._send(self.lobby.tick(now))
        if self.lobby.state is LobbyState.STARTING and not self._begun and not self._stopped:
            self._begun = True
            self.host.scheduler.start(self._begin(), self._begin_failed)
        for run in list(self.rollouts):
            if run is self._current:
                self._admit_spectators(run, now)
            self._send(run.tick(now), run.port)
            if run is self._current:
                if run.state is not RunState.RUNNING:
                    self._run_ended(run, now)
                continue
            closed = run.state is RunState.CLOSED
            for player in run.players.values():
                # While it goes on asking there, it has not seen the end, and a late `ready` must not count.
                if closed or (player.here and now >= player.heard + 1.0):
                    self.lobby.settled(player.address, run.port)
            if closed:
                self.rollouts.remove(run)
                del self.host.runs[run.port]
                self.host.close_port(run.port)
        self._arm()

    def _admit_spectators(self, run: Rollout, now: float) -> None:
        for client in self.lobby.clients.values():
            if client.ready and client.port is None and self.lobby.slots[client.key].watches is not None:
                self._join(run, client, now)
                self._send(self.lobby.let_in(client, now))

    def _run_ended(self, run: Rollout, now: float) -> None:
        self._current, self._begun = None, False
        self.world.end()  # nobody is in it any more
        for player in run.players.values():
            if (known := self.lobby.clients.get(player.address)) is not None:
                known.action_seq = max(known.action_seq, player.seq)
        self._send(self.lobby.run_ended(now, [player.address for player in run.players.values() if not player.here]))

    def _arm(self) -> None:
        """Have `tick` called when something is due next."""
        if self._timer is not None:
            self._timer.cancel()
        at = min([self.lobby.wake(), *(run.wake() for run in self.rollouts)])
        self._timer = self.host.scheduler.call_at(at, self.tick) if at < math.inf else None

    def stop(self) -> None:
        """End the run that is on, with done=true for everybody, and say that the server goes."""
        now = self.host.now()
        self._stopped = True
        self._send(self.lobby.say("The server is going away.", now))
        if (run := self._current) is not None:
            self._send(run.end(now), run.port)

    async def close(self) -> None:
        """Do nothing more, and close the environment."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
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
    """Several instances on one lobby port.

    Args:
        guard: Limits of all of them together.
        scheduler: Runs what waits; its clock is everybody's.
        send: Sends from a rollout port (None: the lobby's) a datagram to an address.
        open_port: Opens a rollout port and returns its number.
        close_port: Closes one.
        epoch: Seconds to add to the scheduler's time for the time since 1970.
    """

    def __init__(
        self,
        guard: GuardConfig | None,
        scheduler: Scheduler,
        *,
        send: Callable[[int | None, bytes, Address], None],
        open_port: Callable[[], int],
        close_port: Callable[[int], None],
        epoch: float = 0.0,
    ) -> None:
        self.guard = Guard(guard)
        self.scheduler, self.send, self.epoch = scheduler, send, epoch
        self.now = scheduler.now
        self.instances: dict[packet.Header, Instance] = {}
        self.runs: dict[int, tuple[Instance, Rollout]] = {}
        """The rollouts whose ports are open, by port."""
        self.counts = self.guard.dropped
        self._open, self.close_port = open_port, close_port
        self._recent: deque[int] = deque(maxlen=64)

    def open_port(self) -> int:
        """Open a rollout port that none of the last runs had: clients tell runs apart by it."""
        refused: list[int] = []
        port = self._open()
        while port in self._recent and len(refused) < 8:
            refused.append(port)
            port = self._open()
        for other in refused:
            self.close_port(other)
        self._recent.append(port)
        return port

    async def add(self, instance: Instance) -> None:
        """Open and publish an instance; raises what `Instance.open` does.

        Raises:
            SettingError: There is one of that name and number.
        """
        if instance.header in self.instances:
            raise SettingError(f"expected each name and number once, got {instance.header} twice")
        await instance.open()
        self.instances[instance.header] = instance

    def receive(self, port: int | None, datagram: bytes, sender: Address) -> None:
        """Take a datagram that came to the lobby's port (None) or a rollout's; whatever it holds, nothing is raised."""
        if port is not None:
            if port in self.runs:
                instance, run = self.runs[port]
                instance.receive(run, datagram, sender)
            else:
                self.counts["closed port"] += 1
            return
        if not self.guard.heard(sender, datagram, self.now()):
            return
        try:
            message = packet.parse_client(datagram)
        except PacketError:
            self.counts["malformed"] += 1
            return
        known = self.instances.get(message.header)
        if known is not None:
            known.handle(message, sender, len(datagram))
            return
        self.counts["no such instance"] += 1
        if isinstance(message, packet.LobbyRequest):
            names = ", ".join(map(str, list(self.instances)[:8]))
            text = packet.Message(message.header, f"There is no {message.header} here; there is {names}")
            told = packet.format_message(text)
            if self.guard.answer(sender, len(told), len(datagram), self.now()):
                self.send(None, told, sender)
