"""All instances of one server: each has a lobby, an environment that a clock steps, and its runs. No socket.

`Host.receive` takes datagrams, and everything that is to be sent goes to the function `send`. What waits, waits by the
scheduler's timers; environments are called where they live, as those of real-time worlds are.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from bridge.errors import InvalidActionError, PacketError, SettingError, UnsupportedSpaceError
from bridge.logs import SafeLog
from bridge.perlert import lobby, rollout
from bridge.perlert.guard import Address, Guard, GuardConfig
from bridge.perlert.protocol import packet, profile
from bridge.perlert.protocol.codec import TextCodec
from bridge.worlds.default_actions import neutral_action
from bridge.worlds.realtime.loop import Job, RealtimeLoop
from bridge.worlds.scheduling import Executor, Scheduler, Timer

__all__ = ["Host", "Instance", "Policy", "Send"]

Policy: TypeAlias = Callable[[Any], Any]
"""A bot: observation in, action out."""
Send: TypeAlias = Callable[[int | None, bytes, Address], None]
"""Sends from a rollout port (None: the lobby's) a datagram to an address."""

_log = SafeLog(__name__)

# What stands in an S5 besides header and observation: timestamp, step, reward, done, and the profile's counters.
_AROUND = 240


class Instance:
    """One environment with its lobby and its runs.

    Args:
        header: Its name and number.
        env: The environment, as `worlds.make_world` returns it.
        agents: Each slot's KEY and KIND, in the order of the environment's agents.
        host: What it belongs to.
        bots: Policies by slot key, or `"random"`; they play while no client holds the slot.
        spectators: Slots for clients that only watch: `spectator0`, …
        policy: When to start.
        lobby_config: Times of the lobby.
        rollout_config: Rates and times of the runs.
        default_actions: By slot key, what is done until the first valid action; None: the neutral action.
        seed: Of the first run.

    Raises:
        UnsupportedSpaceError: A space has no text form, or an observation may be longer than a datagram.
        SettingError: A bot or default action for a slot that does not exist, or that is none.
    """

    def __init__(
        self,
        header: packet.Header,
        env: Any,
        agents: Mapping[str, str],
        host: Host,
        *,
        bots: Mapping[str, Policy | str] | None = None,
        spectators: int = 0,
        policy: lobby.StartPolicy | None = None,
        lobby_config: lobby.LobbyConfig | None = None,
        rollout_config: rollout.RolloutConfig | None = None,
        default_actions: Mapping[str, Any] | None = None,
        seed: int | None = None,
    ) -> None:
        self.header, self.env, self.host = header, env, host
        self.config = rollout_config or rollout.RolloutConfig()
        self.runs = 0
        self.failures = 0
        self.frames = self.late_frames = 0
        """Frames that were made, and those that began more than a frame's time late or were left out."""
        self._names = dict(zip(agents, env.possible_agents, strict=True))
        self._keys = {name: key for key, name in self._names.items()}
        self._seed = seed
        self._seen: dict[str, Any] = {}
        self._alive: list[str] = []
        self._clock: RealtimeLoop | None = None
        self._current: rollout.Rollout | None = None
        self._lingering: list[rollout.Rollout] = []
        self._timer: Timer | None = None
        self._stopped = False
        self._spaces = {key: (env.observation_space(name), env.action_space(name)) for key, name in self._names.items()}
        for what, names in (("bots", bots or {}), ("default_action", default_actions or {})):
            if unknown := set(names) - set(agents):
                raise SettingError(f"expected {what} for slots of {', '.join(agents)}, got {sorted(unknown)}")
        if spectators < 0:
            raise SettingError(f"expected 0 spectators or more, got {spectators!r}")
        self._bots = {key: self._bot(key, policy) for key, policy in (bots or {}).items()}
        self._observations: dict[str, TextCodec] = {}
        self._actions: dict[str, TextCodec] = {}
        self._defaults: dict[str, Any] = {}
        self._offers: dict[str, str] = {}
        for key in agents:
            self._prepare(key, dict(default_actions or {}))
        first = next(iter(agents))
        slots = [lobby.SlotConfig(key, kind, bot=key in self._bots) for key, kind in agents.items()]
        slots += [lobby.SlotConfig(f"spectator{i}", "spectator", watches=first) for i in range(spectators)]
        self.lobby = lobby.Lobby(
            header, slots, host.guard, policy=policy, config=lobby_config, offer=self._offer, moved=self._moved
        )

    def _bot(self, key: str, policy: Any) -> Policy:
        space = self._spaces[key][1]
        if policy == "random":
            return lambda observation: space.sample()
        if callable(policy):
            chosen: Policy = policy
            return chosen
        raise SettingError(f'expected bots as policies (observation to action) or "random", got {policy!r} for {key!r}')

    def _prepare(self, key: str, default_actions: Mapping[str, Any]) -> None:
        """Make what reads and writes the texts of a slot."""
        observation_space, action_space = self._spaces[key]
        observations = self._observations[key] = TextCodec(observation_space, decimals=self.config.decimals)
        actions = self._actions[key] = TextCodec(action_space, named=False, decimals=None)
        header = len(str(self.header).encode())
        size = observations.max_bytes() + header + _AROUND
        if size > packet.MAX_MESSAGE:
            raise UnsupportedSpaceError(
                f"expected observations of {self.header} that fit into a datagram of {packet.MAX_MESSAGE} bytes, "
                f"got up to {size} bytes for {observation_space}; use fewer decimals (decimals=2), select or "
                "bound the elements with a wrapper (gymnasium.wrappers.TransformObservation), or serve it over grpc://"
            )
        given = default_actions.get(key, neutral_action(action_space))
        try:
            self._defaults[key] = actions.decode(actions.encode(given))
        except (InvalidActionError, PacketError) as error:
            raise SettingError(f"expected a default_action of {action_space} for {key}, got {given!r}") from error
        spaces = profile.spaces_text(observation_space, action_space)
        # Spaces too long for a message are left out; clients are given them otherwise.
        self._offers[key] = spaces if len(spaces.encode()) + header + 200 <= packet.MAX_MESSAGE else ""

    def _watched(self, key: str) -> str:
        return self.lobby.slots[key].watches or key

    def _offer(self, token: str, seq: int, key: str) -> str:
        spaces = self._offers[self._watched(key)]
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

    def _moved(self, old: Address, client: lobby.Client | None) -> None:
        for run in self.rollouts():
            if client is None:
                run.leave(old)
            else:
                run.move(old, client.address, client.token)

    def _send(self, out: Sequence[lobby.Outgoing], port: int | None = None) -> None:
        for datagram, address in out:
            self.host.send(port, datagram, address)

    # The run

    def _failed(self, error: BaseException) -> str:
        self.failures += 1
        _log.error("the environment of %s failed: %s", self.header, error)
        # The traceback is for the log; the clients are told its first line.
        return str(error).partition("\n")[0]

    def _begin(self) -> None:
        """Have the environment reset for the next run."""
        seed, self._seed = self._seed, None
        self._clock = RealtimeLoop(1, self.config.fps, None, catch_up=self.config.catch_up)
        self._clock.ask_reset(0, seed)
        self._work()

    def _work(self) -> None:
        """Do what the clock says is due."""
        if self._clock is not None and not self._clock.lanes[0].busy:
            for job in self._clock.poll(self.host.now()):
                work = self._reset(job) if job.kind == "reset" else self._step(job)
                self.host.scheduler.start(work, self._worked)

    def _worked(self, result: None, error: BaseException | None) -> None:
        """End the run by what the environment, or a bot, raised; by observations with NaN and rewards without end."""
        if error is None:
            return
        reason, now = self._failed(error), self.host.now()
        self._clock = None
        if self.lobby.state is lobby.State.STARTING:
            self._send(self.lobby.start_failed(reason, now))
        elif (run := self._current) is not None:
            self._send(self.lobby.say(reason, now))
            self._send(run.end(now), run.port)
        self.host.scheduler.call_soon(self.tick)

    def _by_key(self, found: Mapping[Any, Any]) -> dict[str, Any]:
        return {self._keys[name]: value for name, value in found.items() if name in self._keys}

    async def _reset(self, job: Job) -> None:
        observations, _, alive = await self.env.reset(seed=job.seed)
        if self._clock is None or self.lobby.state is not lobby.State.STARTING:
            return  # the server stops
        now = self.host.now()
        self._clock.began(job, now, None, {})
        self._seen, self._alive = self._by_key(observations), [self._keys[name] for name in alive]
        first = self._results(self._seen, {}, {}, {})
        port = self.host.open_port()
        self._current = run = rollout.Rollout(
            self.header,
            port,
            self.host.guard,
            self._decode,
            first=first,
            config=self.config,
            epoch=self.host.epoch,
            now=now,
        )
        self._send(self.lobby.started(port, now))
        for client in self.lobby.clients.values():
            if client.port == port:
                run.join(self._player(client), now)
        self.runs += 1
        self.host.scheduler.call_soon(self.tick)

    def _results(
        self, seen: Mapping[str, Any], rewards: Mapping[str, Any], ended: Mapping[str, Any], cut: Mapping[str, Any]
    ) -> dict[str, rollout.Result]:
        return {
            key: rollout.Result(
                self._observations[key].encode(value),
                float(rewards.get(key, 0.0)),
                bool(ended.get(key, False)),
                bool(cut.get(key, False)),
            )
            for key, value in seen.items()
        }

    async def _step(self, job: Job) -> None:
        run, clock, began = self._current, self._clock, time.perf_counter()
        assert run is not None
        assert clock is not None
        acting, taken = run.actions(), run.taken()
        actions = {key: acting.get(key, self._defaults[key]) for key in self._alive}
        played = {key: self._bots[key] for key in self._alive if key in self._bots and key not in taken}
        if played:
            actions |= await self.host.executor.run(_play, played, self._seen)
        *parts, alive = await self.env.step({self._names[key]: action for key, action in actions.items()})
        if run is not self._current:
            return  # it was ended meanwhile
        seen, rewards, ended, cut = (self._by_key(part) for part in parts[:4])
        results = self._results({key: seen[key] for key in actions if key in seen}, rewards, ended, cut)
        self._seen |= seen
        self._alive = [self._keys[name] for name in alive]
        now = self.host.now()
        clock.stepped(job, now, time.perf_counter() - began, None, 0.0, False, False, {})
        self.frames += 1
        self._send(run.frame(results, now), run.port)
        gone = [key for key in self._names if key not in self._alive]
        self._send(run.end(now, gone, truncated=False), run.port)
        self.host.scheduler.call_soon(self.tick)

    def _decode(self, key: str, text: str) -> Any:
        return self._actions[key].decode(text)

    def _player(self, client: lobby.Client) -> rollout.Player:
        watches = self.lobby.slots[client.key].watches
        return rollout.Player(
            client.address, watches or client.key, client.token, watches is not None, client.action_seq
        )

    # Time

    def tick(self) -> None:
        """Do what is due in the lobby and the runs, and see when there is more."""
        now = self.host.now()
        self._send(self.lobby.tick(now))
        if self.lobby.state is lobby.State.STARTING and self._clock is None and not self._stopped:
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
        self._work()
        self._arm()

    def _tick_run(self, run: rollout.Rollout, now: float) -> None:
        for client in self.lobby.clients.values():
            if client.ready and client.port is None and self.lobby.slots[client.key].watches is not None:
                run.join(self._player(client), now)
                self._send(self.lobby.joined(client, now))
        if run.gathered(now) and self._clock is not None:
            self._clock.start(now)
            # Step 0 is the reset's observation. What it raises is the environment's, as in a step.
            self._send(run.frame(run.first, now), run.port)
        self._send(run.tick(now), run.port)
        if run.state in (rollout.State.LINGERING, rollout.State.CLOSED):
            self._current = None
            self._lingering.append(run)
            if self._clock is not None:
                self.late_frames += self._clock.overruns + self._clock.dropped
                self._clock = None
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
        if self._clock is not None and (due := self._clock.next_due()) is not None:
            # A frame that is late is made when the environment has done the one before.
            times.append(due if not self._clock.lanes[0].busy else math.inf)
        at = min(times)
        self._timer = self.host.scheduler.call_at(at, self.tick) if at < math.inf else None

    def stop(self) -> None:
        """End the run that is on, with done=true for everybody, and say that the server goes."""
        now = self.host.now()
        self._stopped = True
        self._send(self.lobby.say("The server is going away.", now))
        self._clock = None
        if (run := self._current) is not None:
            self._send(run.end(now), run.port)

    def close(self) -> None:
        """Do nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def running(self) -> bool:
        """Whether a run is on."""
        return self._current is not None

    @property
    def owes(self) -> bool:
        """Whether a client has not been sent its done=true yet, because the rate holds it back."""
        return any(player.owed for run in self.rollouts() for player in run.players.values())


def _play(bots: Mapping[str, Policy], seen: Mapping[str, Any]) -> dict[str, Any]:
    return {key: policy(seen[key]) for key, policy in bots.items()}


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
