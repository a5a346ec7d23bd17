"""All instances of one server. Each has a lobby, an environment that a clock steps, and its runs. No sockets.

`InstanceHost.receive` takes datagrams, and outgoing datagrams go to its ports. Environments and bots are called in the
threads or processes of their worlds, as in other real-time worlds.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from bridge.core.extras import provided
from bridge.core.keywords import by_name
from bridge.core.logs import FailureLog
from bridge.core.rounds import RoundState
from bridge.core.worlds.environment import Transition
from bridge.core.worlds.group import default_action
from bridge.core.worlds.realtime.multi_agent import Frame, JointClock, PolicyPlayer
from bridge.core.worlds.scheduling import Scheduler, Timer
from bridge.core.worlds.world import EnvWorld
from bridge.errors import InvalidActionError, PacketError, RequestError, SettingError, UnsupportedSpaceError
from bridge.perlert.lobby import Lobby
from bridge.perlert.protocol import packet, profile
from bridge.perlert.protocol.codec import TextCodec
from bridge.perlert.protocol.guard import Address, Guard, GuardConfig, Outgoing
from bridge.perlert.rollout import Rollout, RolloutConfig

__all__ = ["Instance", "InstanceHost"]

# The parts of an S5 beside header and observation: timestamp, step, reward, done, and the profile's counters.
_AROUND = 240
_TICK = 0.1
"""Seconds between two calls of `tick` while there is a client or a run."""
_MakeWorld: TypeAlias = Callable[..., Awaitable[EnvWorld]]


class _Agent:
    """An agent of the environment, with its codecs and its default action."""

    def __init__(self, header: packet.Header, name: str, spaces: Any, decimals: int, bot: Any, action: Any) -> None:
        self.name = name
        """The agent's name in the environment."""
        self.observations = TextCodec(spaces[0], decimals=decimals)
        # P-2: an action contains no colon, so the parts of a Dict are written without names.
        self.actions = TextCodec(spaces[1], named=False, decimals=None)
        self._most_bytes = packet.MAX_MESSAGE - len(str(header).encode()) - _AROUND
        if (size := self.observations.max_bytes()) > self._most_bytes:
            raise UnsupportedSpaceError(
                f"expected observations of {header} that fit into {self._most_bytes} bytes of a datagram, "
                f"got up to {size} bytes for {spaces[0]}; use fewer decimals (decimals=2), select or "
                "bound the elements with a wrapper (gymnasium.wrappers.TransformObservation), or serve it over grpc://"
            )
        told = profile.spaces_text(*spaces)
        # Spaces that are too long for a message are omitted; clients must then be given them.
        fits = len(told.encode()) + len(str(header).encode()) + 200 <= packet.MAX_MESSAGE
        self.spaces = told if fits else ""
        self.bot = None if bot is None else provided("as_policy")("bots", bot, spaces[1])
        try:
            # Through the codec, so that the environment gets the same types as from a client's action.
            self.default_action = None if action is None else self.actions.decode(self.actions.encode(action))
        except (InvalidActionError, PacketError) as error:
            raise SettingError(f"expected a default_action of {spaces[1]}, got {action!r}") from error
        self.player: PolicyPlayer | None = None
        """Sends the client's actions to the environment, during a run in which the client plays."""

    def observed(self, told: Transition) -> Transition:
        """Return the agent's transition with the observation as text.

        Raises:
            ValueError: The observation contains NaN, or is so far out of bounds that it does not fit a datagram.
        """
        text = self.observations.encode(told.observation)
        if (size := len(text.encode())) > self._most_bytes:
            space = self.observations.space
            raise ValueError(f"expected an observation of {space} in at most {self._most_bytes} bytes, got {size}")
        return Transition(text, told.reward, told.terminated, told.truncated)


def _slots_of(agents: Sequence[str], name: str, slots: Mapping[str, str] | Sequence[str] | None) -> dict[str, str]:
    """Return the KEY and KIND of each agent's slot, in order: the agent's name, and the name without its trailing `_N`.

    `name` is the kind for the one agent of a Gymnasium environment; `slots` overrides the keys, or the keys and kinds.

    Raises:
        SettingError: `slots` does not match the agents.
    """
    if isinstance(slots, str) or (slots is not None and len(set(slots)) != len(agents)):
        raise SettingError(f"expected slots with {len(agents)} keys, one for each agent in order, got {slots!r}")
    if isinstance(slots, Mapping):
        return dict(slots)
    kinds = [re.sub(r"_?[0-9]+\Z", "", agent) or "agent" for agent in agents]
    if list(agents) == ["agent0"]:
        kinds = [name]
    return dict(zip(agents if slots is None else slots, kinds, strict=True))


class Instance:
    """One environment with its lobby and its runs. `open` must be called first.

    `make` makes the environment's world, given the default actions, and makes it again if its process has ended. `seed`
    is the seed of the first run.
    """

    world: EnvWorld
    clock: JointClock
    """The pacer of the world."""
    lobby: Lobby

    def __init__(
        self,
        header: packet.Header,
        make: _MakeWorld,
        host: InstanceHost,
        config: RolloutConfig,
        seed: int | None = None,
    ) -> None:
        self.header, self.host, self.config = header, host, config
        self.runs = 0
        self._make, self._seed = make, seed
        self._agents: dict[str, _Agent] = {}
        """The agents, by the keys of their slots."""
        self._begun = self._stopped = False
        self._timer: Timer | None = None
        self._log = FailureLog(host.scheduler.call_later)

    async def open(
        self, *, slots: Any = None, bots: Any = None, default_action: Any = None, spectators: int = 0, lobby: Any = None
    ) -> None:
        """Make the environment and the lobby for its agents, and publish it. Keywords as for `serve_perlert`.

        `lobby` is a `LobbyConfig`.

        Raises:
            UnsupportedSpaceError: A space has no text form, or an observation may be longer than a datagram.
            SettingError: A setting does not match the environment.
            RequestError: Making the environment failed.
        """
        await self._make_world()
        try:
            kinds = _slots_of(list(self.world.group), self.header.name, slots)
            keys = list(kinds)
            if isinstance(default_action, Mapping) and not default_action.keys() & kinds.keys():
                default_action = dict.fromkeys(keys, default_action)  # one action of a Dict space, not one per agent
            policies = by_name("bots", bots, keys, "slots")
            actions = by_name("default_action", default_action, keys, "slots")
            for key, (name, spaces) in zip(keys, self.world.group.spaces.items(), strict=True):
                given = self.config.decimals, policies.get(key), actions.get(key)
                self._agents[key] = _Agent(self.header, name, spaces, *given)
            if spectators < 0:
                raise SettingError(f"expected 0 spectators or more, got {spectators!r}")
            watches = {f"spectator{i}": keys[0] for i in range(spectators)}
            tags = dict.fromkeys(policies, "cpu")
            found = [packet.Slot(key, True, kind, tags.get(key, ""), key in tags) for key, kind in kinds.items()]
            found += [packet.Slot(key, True, "spectator", "", False) for key in watches]
            guard, offer = self.host.guard, self._offer
            self.lobby = Lobby(self.header, found, guard, config=lobby, watches=watches, offer=offer)
        # A world may have a thread or a process, which must be ended here.
        except BaseException:
            await self.world.close()
            raise
        self.host.instances[self.header] = self

    async def _make_world(self) -> None:
        self.world = await self._make(self._stand_in)
        self.clock = cast(JointClock, self.world.pacer)
        self.clock.subscribe(self._on_frame)

    def _offer(self, token: str, seq: int, key: str) -> str:
        spaces = self._agents[self.lobby.watches.get(key, key)].spaces
        fps, decimals = self.config.fps, self.config.decimals
        return profile.offer_text(token, seq=seq, slot=key, fps=fps, decimals=decimals, spaces=spaces)

    def _stand_in(self, agent: Any, observation: Any, space: Any) -> Any:
        """Return the action of an agent whose client is missing or has not acted yet. Runs in the world's thread."""
        own = next(own for own in self._agents.values() if own.name == str(agent))
        if own.bot is not None and own.player is None:
            return own.bot(observation)
        return default_action(agent, observation, space) if own.default_action is None else own.default_action

    # Input and output

    def send(self, out: Iterable[Outgoing], port: int | None = None) -> None:
        """Send datagrams from a run's port (None: the lobby's)."""
        for datagram, address in out:
            self.host.ports.send(port, datagram, address)

    def _act(self, key: str, text: str) -> None:
        agent = self._agents[key]
        if agent.player is not None:
            agent.player.act(agent.actions.decode(text))

    def _cast(self) -> None:
        """Let each agent be played by its client in the current run, or else by the server."""
        run = self.lobby.run
        played = {player.key for player in run.players.values() if not player.watching} if run is not None else set()
        for key, agent in self._agents.items():
            if agent.player is not None and key not in played:
                agent.player.leave()
                agent.player = None
            elif agent.player is None and key in played:
                holder = self.lobby.holder(key)
                by = f"agent:{holder.tag}" if holder is not None and holder.tag else "agent"
                agent.player = self.clock.enter(agent.name, by)

    # The run

    async def _begin(self) -> None:
        """Reset the environment for the next run, in a new process if the old one has ended."""
        try:
            if self.world.env.ended is not None:
                await self.world.close()
                await self._make_world()
            # The server was stopped while the process was being started, so the process must be ended here.
            if self._stopped:
                await self.world.close()
                return
            # Only the first run is seeded: with a seed each time, all runs would be the same.
            seed, self._seed = self._seed, None
            self.clock.begin_episode(seed)
        except Exception as error:
            self._break_off(error.message if isinstance(error, RequestError) else repr(error))

    def _on_frame(self, frame: Frame) -> None:
        """Process a frame of the environment, and inform the clients."""
        try:
            if frame.error is not None:
                self._break_off(frame.error)
            elif self.lobby.state is RoundState.STARTING:
                self._start(self._seen(frame))
            elif (run := self.lobby.run) is not None:
                self.send(run.frame(self._seen(frame), self.host.now()), run.port)
        except Exception as error:  # NaN in observations, infinite rewards: an error of the environment
            self._break_off(f"the environment's {type(error).__name__}: {error}")
        if self.lobby.run is None or not self.lobby.run.running:
            self.host.scheduler.call_soon(self.tick)

    def _break_off(self, reason: str) -> None:
        """End the run, or its start, because the environment or a bot raised."""
        now = self.host.now()
        # The log gets the traceback, clients get its first line.
        text = reason.partition("\n")[0]
        if self.lobby.state is RoundState.STARTING:
            self._begun = False
            self.send(self.lobby.start_failed(text, now))
        elif (run := self.lobby.run) is not None:
            self.send(self.lobby.say(text, now))
            self.send(run.end(now), run.port)
        else:
            return
        self._log.add(str(self.header), reason)

    def _seen(self, frame: Frame) -> dict[str, Transition]:
        """Return the transition of each slot's agent, with the observation as text."""
        return {
            key: agent.observed(told)
            for key, agent in self._agents.items()
            if (told := frame.transitions.get(agent.name)) is not None
        }

    def _start(self, first: Mapping[str, Transition]) -> None:
        """Open a port for the run; step 0 contains the observation of the reset."""
        now, port = self.host.now(), self.host.open_port()
        run = Rollout(self.header, port, self.host.guard, self._act, self.config, self.host.epoch)
        self.host.runs[port] = self, run
        self.runs += 1
        # The port is announced before step 0 is sent from it.
        self.send(self.lobby.started(run, now))
        self._cast()
        self.send(run.frame(first, now), port)

    def tick(self) -> None:
        """Do what is due in the lobby and the runs; call again soon while there is a client or a run."""
        if self._stopped:
            return
        now = self.host.now()
        self.send(self.lobby.tick(now))
        starts, had_begun = self.lobby.state is RoundState.STARTING, self._begun
        self._begun = starts
        # Once per start: a reset may last for many ticks.
        if starts and not had_begun:
            self.host.scheduler.start(self._begin(), lambda result, error: None)
        for run in list(self.lobby.runs):
            self.send(run.tick(now), run.port)
            if run.is_closed(now):
                self.lobby.runs.remove(run)
                del self.host.runs[run.port]
                self.host.ports.close_port(run.port)
        self._cast()
        if self.lobby.run is None:
            self.clock.end_episode()
        if self._timer is not None:
            self._timer.cancel()
        due = bool(self.lobby.runs or self.lobby.clients)
        self._timer = self.host.scheduler.call_later(_TICK, self.tick) if due else None

    def stop(self) -> None:
        """End the current run with done=true for every client, announce the server's end, and stop."""
        now = self.host.now()
        self._stopped = True
        self.send(self.lobby.say("The server is going away.", now))
        if (run := self.lobby.run) is not None:
            self.send(run.end(now), run.port)

    async def close(self) -> None:
        """Close the environment; the instance must be stopped."""
        try:
            await self.world.close()
        except RequestError as error:
            self._log.add(str(self.header), error.message)

    def stats(self) -> dict[str, int]:
        """Return counters."""
        loop = self.clock.loop
        late, failures = loop.overruns + loop.dropped, self._log.total
        counts = {"runs": self.runs, "frames": loop.frames, "late_frames": late, "failures": failures}
        return {**counts, "clients": len(self.lobby.clients)}


class InstanceHost:
    """Several instances on one lobby port. `epoch` is the difference between the date and the scheduler's clock.

    `ports` is a `ServerPorts`, or an object with its methods `send`, `open_port` and `close_port`.
    """

    def __init__(self, guard: GuardConfig | None, scheduler: Scheduler, ports: Any, epoch: float = 0.0) -> None:
        self.guard = Guard(guard)
        self.scheduler, self.ports, self.epoch = scheduler, ports, epoch
        self.now = scheduler.now
        self.instances: dict[packet.Header, Instance] = {}
        self.runs: dict[int | None, tuple[Instance, Rollout]] = {}
        """Open rollout ports, with their instances and rollouts."""
        self.counts = self.guard.dropped
        self._recent: deque[int] = deque(maxlen=64)

    def open_port(self) -> int:
        """Open a rollout port that differs from those of recent runs: clients tell runs apart by it."""
        refused: list[int] = []
        while (port := int(self.ports.open_port())) in self._recent and len(refused) < 8:
            # Rejected ports stay open for now: otherwise the system would return the same one again.
            refused.append(port)
        for other in refused:
            self.ports.close_port(other)
        self._recent.append(port)
        return port

    def receive(self, port: int | None, datagram: bytes, sender: Address) -> None:
        """Process a datagram that arrived at the lobby's port (None) or a rollout's; never raises."""
        now = self.now()
        if not self.guard.heard(sender, datagram, now):
            return
        try:
            message = packet.parse_client(datagram)
        except PacketError:
            self.counts["malformed"] += 1
            return
        if port in self.runs:
            instance, run = self.runs[port]
            instance.send(run.handle(message, sender, now), port)
        elif port is not None:
            self.counts["closed port"] += 1
        elif (known := self.instances.get(message.header)) is not None:
            known.send(known.lobby.handle(message, sender, len(datagram), now))
            if sender in known.lobby.clients:
                known.tick()
        else:
            self.counts["no such instance"] += 1
            # A person may have mistyped the name. Other messages of unknown clients get no answer (P-15).
            if isinstance(message, packet.LobbyRequest):
                names = ", ".join(map(str, list(self.instances)[:8]))
                text = f"There is no {message.header} here; there is {names}"
                told = packet.format_message(packet.Message(message.header, text))
                if self.guard.spend(sender, len(told), now):
                    self.ports.send(None, told, sender)
