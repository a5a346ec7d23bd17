"""All instances of one server: each has a lobby, an environment that a clock steps, and its runs. No socket.

`Host.receive` takes datagrams, and everything that is to be sent goes to the function `send`. What waits, waits by the
scheduler's timers; environments are called where they live, as those of real-time worlds are.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from bridge.errors import PacketError, RequestError, SettingError, UnsupportedSpaceError
from bridge.logs import SafeLog
from bridge.perlert import lobby, rollout
from bridge.perlert.guard import Address, Guard, GuardConfig
from bridge.perlert.lobby_parts import Client, SlotConfig
from bridge.perlert.protocol import packet, profile
from bridge.perlert.protocol.codec import TextCodec
from bridge.worlds.realtime.multi_agent import Frame, RealtimeMultiAgentWorld
from bridge.worlds.scheduling import Executor, Scheduler, Timer

__all__ = ["Host", "Instance", "Policy", "Send"]

Policy: TypeAlias = Callable[[Any], Any]
"""A bot: observation in, action out."""
Send: TypeAlias = Callable[[int | None, bytes, Address], None]
"""Sends from a rollout port (None: the lobby's) a datagram to an address."""

_log = SafeLog(__name__)

# What stands in an S5 besides header and observation: timestamp, step, reward, done, and the profile's counters.
_AROUND = 240


@dataclasses.dataclass(frozen=True)
class _Texts:
    """What reads and writes the texts of a slot."""

    observations: TextCodec
    actions: TextCodec
    offer: str
    """Its spaces, as they stand in an offer; empty: too long."""


class Instance:
    """One environment with its lobby and its runs.

    Args:
        header: Its name and number.
        world: The environment, as `worlds.make_world` returns it.
        agents: Each slot's KEY and KIND, in the order of the environment's agents.
        host: What it belongs to.
        bots: Policies by slot key, or `"random"`; they play while no client holds the slot.
        spectators: Slots for clients that only watch: `spectator0`, …
        policy: When to start.
        lobby_config: Times of the lobby.
        rollout_config: Rates and times of the runs.
        seed: Of the first run.

    Raises:
        UnsupportedSpaceError: A space has no text form, or an observation may be longer than a datagram.
        SettingError: A bot for a slot that does not exist, or that is none.
    """

    def __init__(
        self,
        header: packet.Header,
        world: RealtimeMultiAgentWorld,
        agents: Mapping[str, str],
        host: Host,
        *,
        bots: Mapping[str, Policy | str] | None = None,
        spectators: int = 0,
        policy: lobby.StartPolicy | None = None,
        lobby_config: lobby.LobbyConfig | None = None,
        rollout_config: rollout.RolloutConfig | None = None,
        seed: int | None = None,
    ) -> None:
        self.header, self.world, self.host = header, world, host
        self.config = rollout_config or rollout.RolloutConfig()
        self.runs = self.frames = self.failures = 0
        self._names = dict(zip(agents, world.members, strict=True))
        self._seed = seed
        self._begun = False
        self._current: rollout.Rollout | None = None
        self._lingering: list[rollout.Rollout] = []
        self._timer: Timer | None = None
        self._stopped = False
        if unknown := set(bots or {}) - set(agents):
            raise SettingError(f"expected bots for slots of {', '.join(agents)}, got {sorted(unknown)}")
        if spectators < 0:
            raise SettingError(f"expected 0 spectators or more, got {spectators!r}")
        self._bots = {key: self._bot(key, policy) for key, policy in (bots or {}).items()}
        self._bots_play = False
        self._texts = {key: self._prepare(key) for key in agents}
        self._players = {key: world.enter(name) for key, name in self._names.items()}
        first = next(iter(agents))
        slots = [SlotConfig(key, kind, bot=key in self._bots) for key, kind in agents.items()]
        slots += [SlotConfig(f"spectator{i}", "spectator", watches=first) for i in range(spectators)]
        self.lobby = lobby.Lobby(
            header, slots, host.guard, policy=policy, config=lobby_config, offer=self._offer, moved=self._moved
        )
        world.subscribe(self._on_frame)

    def _bot(self, key: str, policy: Any) -> Policy:
        space = self.world.members.spaces[self._names[key]][1]
        if policy == "random":
            return lambda observation: space.sample()
        if callable(policy):
            chosen: Policy = policy
            return chosen
        raise SettingError(f'expected bots as policies (observation to action) or "random", got {policy!r} for {key!r}')

    def _prepare(self, key: str) -> _Texts:
        """Make what reads and writes the texts of a slot."""
        spaces = self.world.members.spaces[self._names[key]]
        observations = TextCodec(spaces[0], decimals=self.config.decimals)
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
        return profile.offer_text(
            token, seq=seq, slot=key, fps=self.config.fps, decimals=self.config.decimals, spaces=spaces
        )

    # Input

    def handle(self, message: packet.ClientMessage, sender: Address, size: int) -> None:
        """Take a message for the lobby."""
        self._send(self.lobby.handle(message, sender, size, self.host.now()))
        if not isinstance(message, packet.LobbyRequest) or sender in self.lobby.clients:
            self.tick()

    def rollouts(self) -> list[rollout.Rollout]:
        """Return the rollouts whose ports are open."""
        return [*self._lingering, *([self._current] if self._current else [])]

    def receive(self, run: rollout.Rollout, datagram: bytes, sender: Address) -> None:
        """Take a datagram that came to a run's port."""
        self._send(run.receive(datagram, sender, self.host.now()), run.port)
        if run.state is not rollout.State.RUNNING:
            self.tick()

    def _moved(self, old: Address, client: Client | None) -> None:
        for run in self.rollouts():
            if client is not None:
                run.move(old, client.address, client.token)
            elif (left := run.leave(old)) is not None:
                self._release(left)

    def _release(self, key: str) -> None:
        """Let the server act in a slot that a client has left."""
        self._players[key].leave()
        self._players[key] = self.world.enter(self._names[key])

    def _send(self, out: Sequence[lobby.Outgoing], port: int | None = None) -> None:
        for datagram, address in out:
            self.host.send(port, datagram, address)

    # The run

    def _begin(self) -> None:
        """Have the environment reset for the next run."""
        seed, self._seed = self._seed, None
        self._begun = True
        try:
            self.world.begin(seed)
        except RequestError as error:  # its process has ended
            self._break_off(error.message)

    def _on_frame(self, frame: Frame) -> None:
        """Take what the environment did, and tell the clients."""
        starts = self.lobby.state is lobby.State.STARTING
        if frame.number == 0 and frame.error is None and not starts:
            return  # of a run that was given up
        try:
            if frame.error is not None:
                self._break_off(frame.error)
            elif starts:
                self._start(frame)
            elif self._current is not None:
                self._advance(self._current, frame)
        except Exception as error:  # observations with NaN, rewards without end: the environment's fault
            self._break_off(f"the environment's {type(error).__name__}: {error}")
        self.host.scheduler.call_soon(self.tick)

    def _break_off(self, reason: str) -> None:
        """End the run, or the start of one, by what the environment or a bot raised."""
        now = self.host.now()
        # The traceback is for the log; the clients are told its first line.
        text = reason.partition("\n")[0]
        if self.lobby.state is lobby.State.STARTING:
            self._send(self.lobby.start_failed(text, now))
        elif (run := self._current) is not None:
            self._send(self.lobby.say(text, now))
            self._send(run.end(now), run.port)
        else:
            return
        self.failures += 1
        self._begun = False
        _log.error("the environment of %s failed: %s", self.header, reason)

    def _results(self, frame: Frame) -> dict[str, rollout.Result]:
        return {
            key: rollout.Result(
                self._texts[key].observations.encode(told.observation), told.reward, told.terminated, told.truncated
            )
            for key, name in self._names.items()
            if (told := frame.transitions.get(name)) is not None
        }

    def _start(self, frame: Frame) -> None:
        """Open a port for the run; step 0 is the reset's observation."""
        first, now = self._results(frame), self.host.now()
        port = self.host.open_port()
        self._current = run = rollout.Rollout(
            self.header, port, self.host.guard, self._act, config=self.config, epoch=self.host.epoch, now=now
        )
        self.runs += 1
        self._send(self.lobby.started(port, now))
        for client in self.lobby.clients.values():
            if client.port == port:
                run.join(self._player(client), now)
        self._send(run.frame(first, now), port)
        self._send(run.end(now, [key for key in self._names if key not in first], truncated=False), port)
        self._have_bots_play(run, frame)

    def _advance(self, run: rollout.Rollout, frame: Frame) -> None:
        self.frames += 1
        self._send(run.frame(self._results(frame), self.host.now()), run.port)
        self._have_bots_play(run, frame)

    def _have_bots_play(self, run: rollout.Rollout, frame: Frame) -> None:
        """Ask the bots for their next actions, where environments are called; a slow one acts later."""
        taken = run.taken()
        alive = [key for key, name in self._names.items() if name in frame.alive and key in self._bots]
        seen = {key: frame.transitions[self._names[key]].observation for key in alive if key not in taken}
        if seen and not self._bots_play:
            self._bots_play = True
            self.host.scheduler.start(self._play(seen), self._played)

    async def _play(self, seen: Mapping[str, Any]) -> None:
        actions = await self.host.executor.run(_ask_bots, self._bots, seen)
        for key, action in actions.items():
            self._players[key].act(action, by="agent:bot")

    def _played(self, result: None, error: BaseException | None) -> None:
        self._bots_play = False
        if error is not None:
            self._break_off(f"a bot raised {type(error).__name__}: {error}")
            self.host.scheduler.call_soon(self.tick)

    def _act(self, key: str, text: str) -> None:
        """Take an action of a client; raises PacketError."""
        client = next((client for client in self.lobby.clients.values() if client.key == key), None)
        action = self._texts[key].actions.decode(text)
        self._players[key].act(action, by=f"agent:{client.tag}" if client is not None and client.tag else "agent")

    def _player(self, client: Client) -> rollout.Player:
        watches = self.lobby.slots[client.key].watches
        return rollout.Player(
            client.address, watches or client.key, client.token, watches is not None, client.action_seq
        )

    # Time

    def tick(self) -> None:
        """Do what is due in the lobby and the runs, and see when there is more."""
        now = self.host.now()
        self._send(self.lobby.tick(now))
        if self.lobby.state is lobby.State.STARTING and not self._begun and not self._stopped:
            self._begin()
        if (run := self._current) is not None:
            self._tick_run(run, now)
        for run in list(self._lingering):
            self._send(run.tick(now), run.port)
            closed = run.state is rollout.State.CLOSED
            for player in run.players.values():
                # While it goes on asking there, it has not seen the end, and a late `ready` must not count.
                if closed or (player.here and now >= player.heard + 1.0):
                    self.lobby.settled(player.address, run.port)
            if closed:
                self._lingering.remove(run)
                self.host.close_port(run.port)
        self._arm()

    def _tick_run(self, run: rollout.Rollout, now: float) -> None:
        for client in self.lobby.clients.values():
            if client.ready and client.port is None and self.lobby.slots[client.key].watches is not None:
                run.join(self._player(client), now)
                self._send(self.lobby.joined(client, now))
        self._send(run.tick(now), run.port)
        if run.state in (rollout.State.LINGERING, rollout.State.CLOSED):
            self._current = None
            self._lingering.append(run)
            self._begun = False
            for player in run.players.values():
                if (known := self.lobby.clients.get(player.address)) is not None:
                    known.action_seq = max(known.action_seq, player.seq)
            missed = [player.address for player in run.players.values() if not player.here]
            self._send(self.lobby.run_ended(now, missed))

    def _arm(self) -> None:
        """Have `tick` called when something is due next."""
        if self._timer is not None:
            self._timer.cancel()
        times = [self.lobby.wake(), *(run.wake() for run in self.rollouts())]
        at = min(times)
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
            _log.error("the environment of %s failed as it was closed: %s", self.header, error)

    @property
    def late_frames(self) -> int:
        """Frames that began more than a frame's time late, or were left out."""
        return self.world.loop.overruns + self.world.loop.dropped

    @property
    def running(self) -> bool:
        """Whether a run is on."""
        return self._current is not None

    @property
    def owes(self) -> bool:
        """Whether a client has not been sent its done=true yet, because the rate holds it back."""
        return any(player.owed for run in self.rollouts() for player in run.players.values())


def _ask_bots(bots: Mapping[str, Policy], seen: Mapping[str, Any]) -> dict[str, Any]:
    return {key: bots[key](observation) for key, observation in seen.items()}


class Host:
    """Several instances on one lobby port.

    Args:
        guard: Limits of all of them together.
        scheduler: Runs what waits; its clock is everybody's.
        executor: Calls the bots.
        send: Sends a datagram.
        open_port: Opens a rollout port and returns its number.
        close_port: Closes one.
        epoch: Seconds to add to the scheduler's time for the time since 1970.
    """

    def __init__(
        self,
        guard: GuardConfig | None,
        scheduler: Scheduler,
        executor: Executor,
        *,
        send: Send,
        open_port: Callable[[], int],
        close_port: Callable[[int], None],
        epoch: float = 0.0,
    ) -> None:
        self.guard = Guard(guard)
        self.scheduler, self.executor, self.send, self.epoch = scheduler, executor, send, epoch
        self.now = scheduler.now
        self.instances: dict[packet.Header, Instance] = {}
        self.counts: Counter[str] = Counter()
        """Datagrams at the lobby port that no instance took, by reason."""
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

    def add(self, instance: Instance) -> None:
        """Publish an instance.

        Raises:
            SettingError: There is one of that name and number.
        """
        if instance.header in self.instances:
            raise SettingError(f"expected each name and number once, got {instance.header} twice")
        self.instances[instance.header] = instance

    def receive(self, port: int | None, datagram: bytes, sender: Address) -> None:
        """Take a datagram that came to the lobby's port (None) or a rollout's; whatever it holds, nothing is raised."""
        if port is not None:
            for instance in self.instances.values():
                for run in instance.rollouts():
                    if run.port == port:
                        instance.receive(run, datagram, sender)
                        return
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

    def stop(self) -> None:
        """End every run and say that the server goes."""
        for instance in self.instances.values():
            instance.stop()

    @property
    def running(self) -> bool:
        """Whether a run is on in any instance."""
        return any(instance.running for instance in self.instances.values())

    @property
    def owes(self) -> bool:
        """Whether a client has not been sent its done=true yet."""
        return any(instance.owes for instance in self.instances.values())
