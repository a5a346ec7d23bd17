"""One run on its rollout port: the newest action of each agent in, steps out to each client. No clock, no socket.

The owner drives the environment, and gives `frame` what each agent saw. `receive` takes what came to the port and hands
valid actions on, `tick` resends; both return datagrams to send, and `wake()` says when one is due.
"""

from __future__ import annotations

import dataclasses
import enum
import hmac
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal, localcontext

from bridge.errors import PacketError, SettingError
from bridge.perlert.guard import Address, Guard
from bridge.perlert.lobby import Outgoing
from bridge.perlert.protocol import packet, profile
from bridge.perlert.protocol.codec import DECIMALS, decimal_text

__all__ = ["TRANSITIONS", "Event", "Player", "Result", "Rollout", "RolloutConfig", "State"]


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
    """S5 a second to one client (P-21); rewards of steps that are not sent are added to the next one."""
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

    @property
    def done(self) -> bool:
        """Whether the episode is over for this agent."""
        return self.terminated or self.truncated


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
    ret: Decimal = Decimal(0)
    """The return, rounded."""
    ret_sent: Decimal = Decimal(0)
    """The return up to the last S5 that was sent."""
    times: deque[float] = dataclasses.field(default_factory=deque)
    """When S5 were sent in the last second."""
    due: float = -math.inf
    last: bytes = b""
    """The S5 with done=true."""
    done_at: float | None = None
    owed: bool = False
    """Whether the S5 with done=true has yet to be sent for the first time."""
    resends: list[float] = dataclasses.field(default_factory=list)


class Rollout:
    """A run.

    Args:
        header: Which instance.
        port: Its UDP port, which names it.
        guard: The book of bytes, shared by all of a server.
        act: Takes the text of an action of a slot, or raises PacketError, which is counted and changes nothing.
        config: Rates and times.
        epoch: Seconds to add to `now` for the wall-clock time since 1970.
        now: The time of the start.
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
        self.counts: Counter[str] = Counter()
        """Datagrams that changed nothing, by reason."""
        self.step = -1
        self._act = act
        self._returns: dict[str, Decimal] = {}
        self._results: dict[str, Result] = {}
        self._begun_at = now

    # Clients

    def join(self, player: Player, now: float) -> None:
        """Let a client in."""
        player.heard = now
        player.ret = player.ret_sent = self._rounded(player.key)
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

    def taken(self) -> set[str]:
        """Return the slots that clients play."""
        return {player.key for player in self.players.values() if not player.watching}

    # Input

    def receive(self, datagram: bytes, sender: Address, now: float) -> list[Outgoing]:
        """Take a datagram that came to the rollout's port; whatever it holds, nothing is raised."""
        if not self.guard.heard(sender, datagram, now):
            return []
        player = self.players.get(sender)
        if player is None:
            self.counts["not in this run"] += 1
            return []
        try:
            message = packet.parse_client(datagram)
        except PacketError:
            self.counts["malformed"] += 1
            return []
        if message.header != self.header:
            self.counts["other instance"] += 1
            return []
        text = message.action if isinstance(message, packet.Action) else ""
        seq = player.seq
        if player.token:
            own = self._authenticated(player, text)
            if own is None:
                return []
            seq, text = own
        player.heard, player.here = now, True
        if player.done_at is not None:
            out: list[Outgoing] = []
            if now <= player.done_at + self.config.linger:
                self._resend(player, now, out)  # P-18
            return out
        if text:
            self._apply(player, seq, text)
        return []

    def _authenticated(self, player: Player, action: str) -> tuple[int, str] | None:
        """Return number and text of an action that is the client's own and of this run; None: it is not."""
        parts = profile.split_action(action)
        if parts is None or not hmac.compare_digest(parts[0], player.token):
            self.counts["action without token"] += 1
            return None
        if parts[1] != self.port:
            self.counts["action of another run"] += 1
            return None
        player.got += 1
        return parts[2], parts[3]

    def _apply(self, player: Player, seq: int, text: str) -> None:
        if player.token and seq <= player.seq:
            self.counts["stale action"] += 1
            return
        if player.watching:
            player.seq = seq
            self.counts["action of a spectator"] += 1
            return
        try:
            self._act(player.key, text)
        except PacketError:
            self.counts["invalid action"] += 1  # P-27: the last valid one stays
            return
        player.seq = seq

    # Frames

    def _rounded(self, key: str) -> Decimal:
        with localcontext() as context:
            context.prec = 400
            return self._returns.get(key, Decimal(0)).quantize(Decimal(1).scaleb(-self.config.decimals))

    def frame(self, results: Mapping[str, Result], now: float) -> list[Outgoing]:
        """Send what each agent saw of this frame; slots without a result are not in it any more.

        Raises:
            ValueError: A reward is not finite, or beyond all measure; nothing was sent.
        """
        for result in results.values():
            if not abs(result.reward) < 1e20:
                raise ValueError(f"expected a reward below 1e20, got {result.reward!r}")
        self.step += 1
        with localcontext() as context:
            context.prec = 400
            for key, result in results.items():
                self._returns[key] = self._returns.get(key, Decimal(0)) + Decimal(repr(float(result.reward)))
        self._results |= results
        out: list[Outgoing] = []
        rounded = {key: self._rounded(key) for key in results}
        for player in self.players.values():
            if player.done_at is None and (known := results.get(player.key)) is not None:
                player.ret = rounded[player.key]
                self._show(player, known, now, out)
        self._settle()
        return out

    def _datagram(self, player: Player, result: Result, now: float, end: str | None) -> bytes:
        extra = None
        if player.token:
            counts = player.seq, player.got, player.sent + 1
            extra = profile.extra_text(profile.Extra(player.token, *counts, player.ret, end))
        return packet.format_message(
            packet.Step(
                self.header,
                max(0, round((now + self.epoch) * 1000)),
                max(self.step, 0),
                result.observation,
                decimal_text(player.ret - player.ret_sent),
                end is not None,
                extra,
            )
        )

    def _show(self, player: Player, result: Result, now: float, out: list[Outgoing]) -> None:
        if result.done:
            self._finish(player, result, now, out)
        elif not self._may(player, now):
            self.counts["not sent, rate"] += 1
        elif self._send(player, self._datagram(player, result, now, None), now, out):
            player.sent += 1
            player.ret_sent = player.ret

    def _finish(self, player: Player, result: Result, now: float, out: list[Outgoing]) -> None:
        end = "truncated" if result.truncated and not result.terminated else "terminated"
        player.last = self._datagram(player, result, now, end)
        player.sent += 1
        player.ret_sent = player.ret
        player.done_at = now
        player.resends = [now + after for after in self.config.resends if after <= self.config.linger]
        if not self._resend(player, now, out):
            player.owed = True
            player.resends.insert(0, max(now, self._next_slot(player)))

    def _may(self, player: Player, now: float) -> bool:
        """Tell whether the rate (P-21) lets an S5 go: evenly spread, and never more than `max_rate` in any second."""
        while player.times and now - player.times[0] > 1 - 1e-6:
            player.times.popleft()
        return len(player.times) < self.config.max_rate and now >= player.due - 1e-6

    def _next_slot(self, player: Player) -> float:
        """Return when the rate lets the next S5 go."""
        full = len(player.times) >= self.config.max_rate
        return max(player.due, player.times[0] + 1.0) if full else player.due

    def _send(self, player: Player, datagram: bytes, now: float, out: list[Outgoing]) -> bool:
        if not self.guard.spend(player.address, len(datagram), now):
            return False
        player.times.append(now)
        interval = 1 / self.config.max_rate
        player.due = max(player.due, now - interval / 2) + interval
        out.append((datagram, player.address))
        return True

    def _resend(self, player: Player, now: float, out: list[Outgoing]) -> bool:
        if self._may(player, now) and self._send(player, player.last, now, out):
            player.owed = False
            return True
        return False

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
            result = self._results.get(player.key)
            text = result.observation if result is not None else "none"
            self._finish(player, Result(text, 0.0, not truncated, truncated), now, out)
        self._settle()
        return out

    # Time

    def tick(self, now: float) -> list[Outgoing]:
        """Do what is due: resend done=true, give up an abandoned run, close."""
        out: list[Outgoing] = []
        if self.state is State.RUNNING and now >= self._heard() + self.config.abandoned:
            self.counts["abandoned"] += 1
            out += self.end(now)
        if self.state is State.LINGERING:  # for spectators of a slot that went on
            out += self.end(now)
        for player in self.players.values():
            if player.resends and now >= player.resends[0]:
                if self._resend(player, now, out):
                    player.resends.pop(0)
                else:  # the rate or the budget is used up: a little later
                    player.resends[0] = max(now + 1 / self.config.max_rate, self._next_slot(player))
            if player.done_at is not None and now > player.done_at + self.config.linger:
                player.resends.clear()
        if self.state is State.LINGERING and now >= self._closes_at():
            self.state = TRANSITIONS[self.state, Event.LINGERED]
        return out

    def _heard(self) -> float:
        return max((p.heard for p in self.players.values() if not p.watching), default=self._begun_at)

    def _closes_at(self) -> float:
        return max(
            (player.done_at for player in self.players.values() if player.done_at is not None), default=self._begun_at
        ) + (self.config.linger if self.players else 0.0)

    def wake(self) -> float:
        """Return when something is due next: a resend, the end."""
        if self.state is State.CLOSED:
            return math.inf
        times = [player.resends[0] for player in self.players.values() if player.resends]
        times.append(self._closes_at() if self.state is State.LINGERING else self._heard() + self.config.abandoned)
        return min(times)
