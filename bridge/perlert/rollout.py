"""One run on its rollout port: the newest action of each agent in, steps out to each client. No clock, no socket.

The owner drives the environment, and gives `frame` what each agent saw. `receive` takes what came to the port and hands
valid actions on, `tick` resends; both return datagrams to send, and `wake()` says when one is due.
"""

from __future__ import annotations

import dataclasses
import enum
import hmac
import math
from collections.abc import Callable, Iterable, Mapping
from decimal import Context, Decimal

from bridge.errors import PacketError, SettingError
from bridge.perlert.guard import Address, Guard, Outgoing
from bridge.perlert.protocol import packet, profile
from bridge.perlert.protocol.codec import DECIMALS, decimal_text

__all__ = ["TRANSITIONS", "Event", "Player", "Result", "Rollout", "RolloutConfig", "State"]

_EXACT = Context(prec=400)


class State(enum.Enum):
    """Where the run is."""

    RUNNING = "running"
    LINGERING = "lingering"
    CLOSED = "closed"


class Event(enum.Enum):
    """What moves it on."""

    ALL_DONE = "every client has done=true"
    LINGERED = "the time to ask again is over"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.RUNNING, Event.ALL_DONE): State.LINGERING,
    (State.LINGERING, Event.LINGERED): State.CLOSED,
}


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """Rates and times of a run."""

    fps: float = 30.0
    """Frames of the simulation a second."""
    max_rate: int = 30
    """S5 a second to one client (P-21), and one more where a frame is early or late; rewards of steps that are not sent
    are added to the next one, and the last step is sent in any case."""
    linger: float = 10.0
    """Seconds that the port stays open after a client's done=true (P-17)."""
    resends: tuple[float, ...] = (1.0, 3.0, 7.0)
    """When done=true is sent again unasked, seconds after it."""
    abandoned: float = 60.0
    """A run whose clients were all silent for so long is ended."""
    decimals: int = DECIMALS
    """Decimal places of rewards; the running return is rounded, so that the error never adds up."""

    def __post_init__(self) -> None:
        for name in ("fps", "max_rate", "abandoned"):
            if not 0 < getattr(self, name) < math.inf:
                raise SettingError(f"expected a positive {name}, got {getattr(self, name)!r}")
        if min(self.linger, self.decimals) < 0:
            raise SettingError("expected linger and decimals of 0 or more")


@dataclasses.dataclass(frozen=True)
class Result:
    """What one agent saw of one step."""

    observation: str
    reward: float
    terminated: bool = False
    truncated: bool = False


@dataclasses.dataclass(slots=True)
class Player:
    """One client in the run."""

    address: Address
    key: str
    """The slot whose steps it sees."""
    token: str = ""
    """What each of its actions carries; empty: a client that knows the draft alone."""
    watching: bool = False
    """A spectator: its actions are ignored, and it is not waited for."""
    seq: int = 0
    """The newest action that was applied, in earlier runs too."""
    here: bool = False
    """Whether it has reached the rollout port."""
    heard: float = -math.inf
    got: int = 0
    sent: int = 0
    ret_sent: Decimal = Decimal(0)
    """The return, rounded, up to the last S5 that was sent."""
    due: float = -math.inf
    """When the next S5 would be sent at an even rate."""
    last: bytes = b""
    """The S5 with done=true."""
    done_at: float | None = None
    resends: list[float] = dataclasses.field(default_factory=list)


class Rollout:
    """A run, which is named by its UDP port.

    `act` takes a slot's key and the text of an action, or raises PacketError, which is counted and changes nothing.
    `epoch` is what to add to `now` for the seconds since 1970.
    """

    def __init__(
        self,
        header: packet.Header,
        port: int,
        guard: Guard,
        act: Callable[[str, str], None],
        *,
        config: RolloutConfig | None = None,
        epoch: float = 0.0,
        now: float,
    ) -> None:
        self.header, self.port, self.guard, self.epoch = header, port, guard, epoch
        self.config = config or RolloutConfig()
        self.state = State.RUNNING
        self.players: dict[Address, Player] = {}
        self.counts = guard.dropped
        self.step = -1
        self._act = act
        self._returns: dict[str, Decimal] = {}
        self._observations: dict[str, str] = {}
        self._begun_at = now

    # Clients

    def join(self, player: Player, now: float) -> None:
        """Let a client in."""
        player.heard = now
        player.ret_sent = self._rounded(player.key)
        self.players[player.address] = player

    def move(self, old: Address, new: Address, token: str) -> None:
        """Take note that a client has another address."""
        if (player := self.players.pop(old, None)) is not None:
            player.address, player.token, player.seq, player.here = new, token, 0, False
            self.players[new] = player

    def leave(self, address: Address) -> str | None:
        """Take a client out; return the slot that it played, which does what the server chooses."""
        player = self.players.pop(address, None)
        self._settle()
        return player.key if player is not None and not player.watching else None

    # Input

    def receive(self, datagram: bytes, sender: Address, now: float) -> list[Outgoing]:
        """Take a datagram that came to the rollout's port; whatever it holds, nothing is raised."""
        out: list[Outgoing] = []
        if self.guard.heard(sender, datagram, now):
            problem = self._take(datagram, sender, now, out)
            if problem:
                self.counts[problem] += 1
        return out

    def _take(self, datagram: bytes, sender: Address, now: float, out: list[Outgoing]) -> str:
        """Take a datagram; return why it changes nothing, or nothing."""
        player = self.players.get(sender)
        if player is None:
            return "not in this run"
        try:
            message = packet.parse_client(datagram)
        except PacketError:
            return "malformed"
        if message.header != self.header:
            return "other instance"
        text, seq = message.action if isinstance(message, packet.Action) else "", player.seq
        if player.token:
            parts = profile.split_action(text)
            if parts is None or not hmac.compare_digest(parts[0], player.token):
                return "action without token"
            _, port, seq, text = parts
            if port != self.port:
                return "action of another run"
            player.got += 1
        player.heard, player.here = now, True
        if player.done_at is not None:
            if now <= player.done_at + self.config.linger and now >= player.due - 1e-6:
                self._send(player, player.last, now, out)  # P-18
            return ""
        if not text:
            return ""
        if player.token and seq <= player.seq:
            return "stale action"
        if player.watching:
            player.seq = seq
            return "action of a spectator"
        try:
            self._act(player.key, text)
        except PacketError:
            return "invalid action"  # P-27: the last valid one stays
        player.seq = seq
        return ""

    # Frames

    def _rounded(self, key: str) -> Decimal:
        places = Decimal(1).scaleb(-self.config.decimals)
        return self._returns.get(key, Decimal(0)).quantize(places, context=_EXACT)

    def frame(self, results: Mapping[str, Result], now: float) -> list[Outgoing]:
        """Send what each agent saw of this frame; slots without a result are not in it any more.

        Raises:
            ValueError: A reward is not finite, or beyond all measure; nothing was sent.
        """
        for result in results.values():
            if not abs(result.reward) < 1e20:
                raise ValueError(f"expected a reward below 1e20, got {result.reward!r}")
        self.step += 1
        for key, result in results.items():
            reward = Decimal(repr(float(result.reward)))
            self._returns[key] = _EXACT.add(self._returns.get(key, Decimal(0)), reward)
            self._observations[key] = result.observation
        out: list[Outgoing] = []
        for player in self.players.values():
            if player.done_at is None and (known := results.get(player.key)) is not None:
                end = "terminated" if known.terminated else "truncated" if known.truncated else None
                if end is None and now < player.due - 1e-6:  # P-21
                    self.counts["not sent, rate"] += 1
                else:
                    self._show(player, end, now, out)
        self._settle()
        return out

    def _show(self, player: Player, end: str | None, now: float, out: list[Outgoing]) -> None:
        """Send what a client's agent saw last, with its rewards since the last S5; the last one may follow later."""
        if end is not None:
            player.done_at = now
            player.resends = [now + after for after in self.config.resends if after <= self.config.linger]
        ret, extra = self._rounded(player.key), None
        if player.token:
            counts = player.seq, player.got, player.sent + 1
            extra = profile.extra_text(profile.Extra(player.token, *counts, ret, end))
        stamp, reward = max(0, round((now + self.epoch) * 1000)), decimal_text(ret - player.ret_sent)
        seen = self._observations.get(player.key, "none")
        step = packet.Step(self.header, stamp, max(self.step, 0), seen, reward, end is not None, extra)
        player.last = packet.format_message(step)
        if self._send(player, player.last, now, out) or end is not None:
            player.sent += 1
            player.ret_sent = ret

    def _send(self, player: Player, datagram: bytes, now: float, out: list[Outgoing]) -> bool:
        """Send, unless the guard refuses; count it against the rate, of which a frame's worth may be left over."""
        if not self.guard.spend(player.address, len(datagram), now):
            return False
        interval = 1 / self.config.max_rate
        player.due = max(player.due, now - interval) + interval
        out.append((datagram, player.address))
        return True

    def _settle(self) -> None:
        """End when every client that plays has its end; a spectator alone keeps nothing going."""
        if self.state is State.RUNNING and all(
            player.done_at is not None or player.watching for player in self.players.values()
        ):
            self.state = TRANSITIONS[self.state, Event.ALL_DONE]

    def end(self, now: float, keys: Iterable[str] | None = None, *, truncated: bool = True) -> list[Outgoing]:
        """Send done=true to every client (or those of some slots) that has not had it, with what it last saw."""
        wanted = None if keys is None else set(keys)
        ending = [p for p in self.players.values() if p.done_at is None and (wanted is None or p.key in wanted)]
        if ending:
            self.step += 1  # a step of its own, or it would read as the last one again
        out: list[Outgoing] = []
        for player in ending:
            self._show(player, "truncated" if truncated else "terminated", now, out)
        self._settle()
        return out

    # Time

    def tick(self, now: float) -> list[Outgoing]:
        """Do what is due: resend done=true, give up an abandoned run, close."""
        out: list[Outgoing] = []
        if self.state is State.RUNNING and now >= self._abandoned_at():
            self.counts["abandoned"] += 1
            out += self.end(now)
        if self.state is State.LINGERING:  # for spectators of a slot that went on
            out += self.end(now)
        for player in self.players.values():
            if player.resends and now >= player.resends[0]:
                player.resends.pop(0)
                self._send(player, player.last, now, out)
        if self.state is State.LINGERING and now >= self._closes_at():
            self.state = TRANSITIONS[self.state, Event.LINGERED]
        return out

    def _abandoned_at(self) -> float:
        heard = (player.heard for player in self.players.values() if not player.watching)
        return max(heard, default=self._begun_at) + self.config.abandoned

    def _closes_at(self) -> float:
        ends = [player.done_at for player in self.players.values() if player.done_at is not None]
        return max(ends, default=self._begun_at) + (self.config.linger if self.players else 0.0)

    def wake(self) -> float:
        """Return when something is due next: a resend, the end."""
        if self.state is State.CLOSED:
            return math.inf
        times = [player.resends[0] for player in self.players.values() if player.resends]
        return min([*times, self._closes_at() if self.state is State.LINGERING else self._abandoned_at()])
