"""All instances of one server: routes datagrams to lobbies and rollouts, steps the worlds. No clock, no socket.

The owner gives `open_port` and `close_port` for rollouts, calls `receive` and `tick`, and sends what they return.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from bridge.errors import InvalidActionError, PacketError, SettingError, UnsupportedSpaceError
from bridge.logs import SafeLog
from bridge.perlert import lobby, packet, profile, rollout
from bridge.perlert.codec import TextCodec, default_action, space_to_text
from bridge.perlert.guard import Address, Guard, GuardConfig
from bridge.perlert.worlds import World

__all__ = ["Host", "Instance", "Policy", "Send"]

Policy: TypeAlias = Callable[[Any], Any]
"""A bot: observation in, action out."""
Send: TypeAlias = tuple[int | None, bytes, Address]
"""From which rollout port (None: the lobby's), what, to whom."""

_log = SafeLog(__name__)

# What stands in an S5 besides header and observation: timestamp, step, reward, done, and the profile's counters.
_AROUND = 240


@dataclasses.dataclass
class _Run:
    port: int
    rollout: rollout.Rollout


class Instance:
    """One world with its lobby and its runs.

    Args:
        header: Its name and number.
        world: The environment.
        guard: The book of bytes.
        open_port: Opens a rollout port.
        close_port: Closes one.
        new_token: Makes the profile's tokens.
        bots: Policies by slot key; they play while no client holds the slot.
        spectators: Slots for clients that only watch: `spectator0`, …
        policy: When to start.
        lobby_config: Times of the lobby.
        rollout_config: Rates and times of the runs.
        default_actions: By slot key, what is done until the first valid action; None: see `codec.default_action`.
        seed: Of the first run.
        epoch: Seconds to add to `now` for the time since 1970.

    Raises:
        UnsupportedSpaceError: A space has no text form, or an observation may be longer than a datagram.
        SettingError: A bot or default action for a slot that does not exist.
    """

    def __init__(
        self,
        header: packet.Header,
        world: World,
        guard: Guard,
        *,
        open_port: Callable[[], int],
        close_port: Callable[[int], None],
        new_token: Callable[[], str],
        bots: Mapping[str, Policy] | None = None,
        spectators: int = 0,
        policy: lobby.StartPolicy | None = None,
        lobby_config: lobby.LobbyConfig | None = None,
        rollout_config: rollout.RolloutConfig | None = None,
        default_actions: Mapping[str, Any] | None = None,
        seed: int | None = None,
        epoch: float = 0.0,
    ) -> None:
        self.header, self.world, self.guard, self.epoch = header, world, guard, epoch
        self.config = rollout_config or rollout.RolloutConfig()
        self.bots = dict(bots or {})
        self.runs = 0
        self.failures: Counter[str] = Counter()
        """Environment failures, by exception type."""
        self.frames = 0
        self.late_frames = 0
        self._open_port, self._close_port = open_port, close_port
        self._seed = seed
        self._current: _Run | None = None
        self._lingering: list[_Run] = []
        self._seen: dict[str, Any] = {}
        keys = list(world.agents)
        for what, names in (("bots", self.bots), ("default_action", default_actions or {})):
            if unknown := set(names) - set(keys):
                raise SettingError(f"expected {what} for slots of {', '.join(keys)}, got {sorted(unknown)}")
        if spectators < 0:
            raise SettingError(f"expected 0 spectators or more, got {spectators!r}")
        self._observations: dict[str, TextCodec] = {}
        self._actions: dict[str, TextCodec] = {}
        for key in keys:
            observation_space, action_space = world.spaces(key)
            self._observations[key] = TextCodec(observation_space, decimals=self.config.decimals)
            self._actions[key] = TextCodec(action_space, named=False, decimals=None)
            size = self._observations[key].max_bytes() + len(str(header).encode()) + _AROUND
            if size > packet.MAX_MESSAGE:
                raise UnsupportedSpaceError(
                    f"expected observations of {header} that fit into a datagram of {packet.MAX_MESSAGE} bytes, "
                    f"got up to {size} bytes for {observation_space}; use fewer decimals (decimals=2), select or "
                    "bound the elements with a wrapper (gymnasium.wrappers.TransformObservation), or serve it over grpc://"
                )
        self._defaults: dict[str, Any] = {}
        for key in keys:
            space = world.spaces(key)[1]
            given = (default_actions or {}).get(key, default_action(space))
            try:
                self._defaults[key] = self._actions[key].decode(self._actions[key].encode(given))
            except (InvalidActionError, PacketError) as error:
                raise SettingError(f"expected a default_action of {space} for {key}, got {given!r}") from error
        slots = [lobby.SlotConfig(key, kind, bot=key in self.bots) for key, kind in world.agents.items()]
        slots += [lobby.SlotConfig(f"spectator{i}", "spectator", watches=keys[0]) for i in range(spectators)]
        self._offers = {slot.key: self._spaces_offer(slot.watches or slot.key) for slot in slots}
        self.lobby = lobby.Lobby(
            header, slots, guard, new_token=new_token, policy=policy, config=lobby_config, offer=self._offer
        )

    def _spaces_offer(self, key: str) -> bool:
        """Tell whether the spaces fit into the offer."""
        try:
            size = sum(len(space_to_text(space).encode()) for space in self.world.spaces(key))
        except UnsupportedSpaceError:
            return False
        return size + 200 <= packet.MAX_MESSAGE - len(str(self.header).encode())

    def _offer(self, token: str, key: str) -> str:
        watched = self.lobby.slots[key].watches or key
        spaces = self.world.spaces(watched) if self._offers[key] else None
        return profile.offer_text(token, fps=self.config.fps, decimals=self.config.decimals, spaces=spaces)

    # Input

    def handle(self, message: packet.ClientMessage, sender: Address, now: float) -> list[Send]:
        """Take a message for the lobby."""
        return self._from_lobby(self.lobby.handle(message, sender, now)) + self.tick(now)

    def ports(self) -> dict[int, rollout.Rollout]:
        """Return the rollouts that are open, by port."""
        runs = [*self._lingering, *([self._current] if self._current else [])]
        return {run.port: run.rollout for run in runs}

    # The run

    @staticmethod
    def _from_lobby(out: Sequence[lobby.Outgoing]) -> list[Send]:
        return [(None, datagram, address) for datagram, address in out]

    @staticmethod
    def _from_run(run: _Run, out: Sequence[lobby.Outgoing]) -> list[Send]:
        return [(run.port, datagram, address) for datagram, address in out]

    def _failed(self, error: Exception) -> str:
        self.failures[type(error).__name__] += 1
        _log.error("the environment of %s failed", self.header, exc_info=error)
        return f"the environment failed: {type(error).__name__}: {error}"

    def _decode(self, key: str, text: str) -> Any:
        return self._actions[key].decode(text)

    def _player(self, client: lobby.Client) -> rollout.Player:
        watches = self.lobby.slots[client.key].watches
        return rollout.Player(
            client.address,
            watches or client.key,
            token=client.token if client.profiled else "",
            watching=watches is not None,
        )

    def _begin(self, now: float) -> list[Send]:
        seed, self._seed = self._seed, None
        try:
            self._seen = self.world.reset(seed)
            first = {key: rollout.Result(self._observations[key].encode(seen), 0.0) for key, seen in self._seen.items()}
            port = self._open_port()
        # Whatever the user's environment raises ends this run, not the server; it is logged and told to the clients.
        except Exception as error:
            return self._from_lobby(self.lobby.start_failed(self._failed(error), now))
        run = _Run(
            port,
            rollout.Rollout(self.header, self.guard, self._decode, config=self.config, epoch=self.epoch, now=now),
        )
        run.rollout.remember(first)
        for client in self.lobby.clients.values():
            run.rollout.join(self._player(client), now)
        self.runs += 1
        self._current = run
        return self._from_lobby(self.lobby.started(port, now))

    def _frame(self, run: _Run, now: float) -> list[Send]:
        try:
            if run.rollout.step < 0:  # step 0 is the reset's observation
                results = {
                    key: rollout.Result(self._observations[key].encode(seen), 0.0) for key, seen in self._seen.items()
                }
            else:
                acting = run.rollout.actions()
                taken = {player.key for player in run.rollout.players.values() if not player.watching}
                actions = {}
                for key in self.world.alive():
                    if key in acting:
                        actions[key] = acting[key]
                    elif key in self.bots and key not in taken:
                        actions[key] = self.bots[key](self._seen[key])
                    else:
                        actions[key] = self._defaults[key]
                steps = self.world.step(actions)
                self.frames += 1
                results = {}
                for key, (seen, reward, terminated, truncated) in steps.items():
                    self._seen[key] = seen
                    text = self._observations[key].encode(seen)
                    results[key] = rollout.Result(text, reward, terminated, truncated)
            out = self._from_run(run, run.rollout.frame(results, now))
            alive = set(self.world.alive())
            gone = [key for key in self.world.agents if key not in alive]
            return out + self._from_run(run, run.rollout.end(now, gone, truncated=False))
        # As above; so do observations with NaN and rewards without end.
        except Exception as error:
            reason = self._failed(error)
            out = self._from_lobby(self.lobby.say(reason, now))
            return out + self._from_run(run, run.rollout.end(now))

    def tick(self, now: float) -> list[Send]:
        """Do what is due in the lobby and the runs."""
        out = self._from_lobby(self.lobby.tick(now))
        if self.lobby.state is lobby.State.STARTING:
            out += self._begin(now)
        if (run := self._current) is not None:
            for client in self.lobby.clients.values():
                if client.ready and not client.playing and self.lobby.slots[client.key].watches is not None:
                    run.rollout.join(self._player(client), now)
                    out += self._from_lobby(self.lobby.joined(client, now))
            if run.rollout.frame_due(now):
                out += self._frame(run, now)
            out += self._from_run(run, run.rollout.tick(now))
            if run.rollout.state in (rollout.State.LINGERING, rollout.State.CLOSED):
                self._current = None
                self._lingering.append(run)
                self.late_frames += run.rollout.counts["late frames"]
                missed = [player.address for player in run.rollout.players.values() if not player.here]
                out += self._from_lobby(self.lobby.run_ended(now, missed))
                if self.lobby.state is lobby.State.STARTING:
                    out += self._begin(now)
        for run in list(self._lingering):
            out += self._from_run(run, run.rollout.tick(now))
            closed = run.rollout.state is rollout.State.CLOSED
            for player in run.rollout.players.values():
                # While it goes on asking there, it has not seen the end, and a late `ready` must not count.
                if closed or (player.here and now >= player.heard + 1.0):
                    self.lobby.settled(player.address, run.port)
            if closed:
                self._lingering.remove(run)
                self._close_port(run.port)
        return out

    def wake(self) -> float:
        """Return when `tick` is due next."""
        runs = [run.rollout.wake() for run in self._lingering]
        if self._current is not None:
            runs.append(self._current.rollout.wake())
        return min([self.lobby.wake(), *runs])

    def stop(self, now: float) -> list[Send]:
        """End the run that is on, with done=true for everybody, and say that the server goes."""
        out = self._from_lobby(self.lobby.say("The server is going away.", now))
        if (run := self._current) is not None:
            out += self._from_run(run, run.rollout.end(now))
        return out

    @property
    def running(self) -> bool:
        """Whether a run is on."""
        return self._current is not None

    @property
    def owes(self) -> bool:
        """Whether a client has not been sent its done=true yet, because the rate holds it back."""
        return any(player.owed for run in self.ports().values() for player in run.players.values())


class Host:
    """Several instances on one lobby port.

    Args:
        guard: Limits of all of them together.
        open_port: Opens a rollout port and returns its number.
        close_port: Closes one.
    """

    def __init__(
        self,
        guard: GuardConfig | None = None,
        *,
        open_port: Callable[[], int],
        close_port: Callable[[int], None],
    ) -> None:
        self.guard = Guard(guard)
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

    def receive(self, port: int | None, datagram: bytes, sender: Address, now: float) -> list[Send]:
        """Take a datagram that came to the lobby's port (None) or a rollout's; whatever it holds, nothing is raised."""
        if port is not None:
            for instance in self.instances.values():
                if (run := instance.ports().get(port)) is not None:
                    return [(port, *item) for item in run.receive(datagram, sender, now)]
            self.counts["closed port"] += 1
            return []
        if not self.guard.heard(sender, len(datagram), now):
            return []
        try:
            message = packet.parse_client(datagram)
        except PacketError:
            self.counts["malformed"] += 1
            return []
        instance_or_none = self.instances.get(message.header)
        if instance_or_none is None:
            self.counts["no such instance"] += 1
            return []
        return instance_or_none.handle(message, sender, now)

    def tick(self, now: float) -> list[Send]:
        """Do what is due in every instance."""
        out: list[Send] = []
        for instance in self.instances.values():
            out += instance.tick(now)
        return out

    def wake(self) -> float:
        """Return when `tick` is due next."""
        return min((instance.wake() for instance in self.instances.values()), default=math.inf)

    def stop(self, now: float) -> list[Send]:
        """End every run and say that the server goes."""
        return [item for instance in self.instances.values() for item in instance.stop(now)]

    @property
    def running(self) -> bool:
        """Whether a run is on in any instance."""
        return any(instance.running for instance in self.instances.values())

    @property
    def owes(self) -> bool:
        """Whether a client has not been sent its done=true yet."""
        return any(instance.owes for instance in self.instances.values())
