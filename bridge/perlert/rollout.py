"""One run on its rollout port: receives each agent's newest action, sends steps to each client. No clock, no socket.

The owner steps the environment, and passes what each agent saw to `frame`. `handle` processes received messages and
passes valid actions to `act`; `tick`, called a few times a second, repeats messages. All three return datagrams to
send.
"""

from __future__ import annotations

import dataclasses
import hmac
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from decimal import Context, Decimal
from typing import TypeAlias

from bridge.core.worlds.environment import Transition
from bridge.errors import PacketError, SettingError
from bridge.perlert.protocol import packet, profile
from bridge.perlert.protocol.codec import DECIMALS, decimal_text
from bridge.perlert.protocol.guard import Address, Guard, Outgoing

__all__ = ["Rollout", "RolloutConfig", "RunMember"]

# A sum of rewards below 1e20, each with the digits that Python writes, has fewer than 400 digits down to the smallest
# float, so only the return is rounded.
_EXACT = Context(prec=400)
_Act: TypeAlias = Callable[[str, str], None]


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """Rates and times of a run."""

    fps: float = 30.0
    """Frames of the simulation per second."""
    max_rate: int = 30
    """S5 messages per second to one client (P-21), and one more if a frame is early or late. Rewards of steps that are
    not sent are added to the next one. The last step is always sent."""
    linger: float = 10.0
    """Seconds for which the port stays open after a client's done=true (P-17)."""
    resends: tuple[float, ...] = (1.0, 3.0, 7.0)
    """When done=true is repeated without a request, in seconds after the first."""
    abandoned: float = 60.0
    """A run is ended after this many seconds without a message of any client."""
    decimals: int = DECIMALS
    """Decimal places of rewards. The running return is rounded, so rounding errors do not add up."""

    def __post_init__(self) -> None:
        for name in ("fps", "max_rate", "abandoned"):
            if not 0 < getattr(self, name) < math.inf:
                raise SettingError(f"expected a positive {name}, got {getattr(self, name)!r}")
        if self.linger < 0:
            raise SettingError(f"expected a linger of 0 seconds or more, got {self.linger!r}")
        if type(self.decimals) is not int or not 0 <= self.decimals <= 12:
            raise SettingError(f"expected decimals from 0 to 12, got {self.decimals!r}")


@dataclasses.dataclass(slots=True)
class RunMember:
    """A client in the run."""

    address: Address
    key: str
    """The slot whose steps the client sees."""
    token: str = ""
    """The token in each of its actions; empty: the client does not use the profile."""
    watching: bool = False
    """True for a spectator: its actions are ignored, and nobody waits for it."""
    seq: int = 0
    """The number of the newest applied action."""
    here: bool = False
    """True if the client has sent something to the rollout port."""
    heard: float = -math.inf
    got: int = 0
    sent: int = 0
    ret_sent: Decimal = Decimal(0)
    """The rounded return up to the last sent S5."""
    due: float = -math.inf
    """When the next S5 may be sent, at an even `max_rate`, in seconds."""
    last: bytes = b""
    """The newest S5."""
    open_until: float = math.inf
    """When the port closes for this client; infinity: done=true has not been sent."""
    resends: list[float] = dataclasses.field(default_factory=list)

    @property
    def done(self) -> bool:
        """True if done=true was sent."""
        return self.open_until < math.inf

    def was_told(self, now: float) -> bool:
        """Return True if the client can have seen its end; while it keeps sending to the port, it has not."""
        # A client that has not seen the end repeats its action several times a second while no step arrives.
        return now >= self.open_until or (self.here and now >= self.heard + 1.0)


class Rollout:
    """A run, identified by its UDP port.

    `act` takes a slot's key and the text of an action. If it raises PacketError, the action is counted as invalid and
    ignored. `epoch + now` is the time in seconds since 1970.
    """

    def __init__(
        self, header: packet.Header, port: int, guard: Guard, act: _Act, config: RolloutConfig, epoch: float = 0.0
    ) -> None:
        self.header, self.port, self.guard, self.config, self.epoch = header, port, guard, config, epoch
        self.players: dict[Address, RunMember] = {}
        self.counts = guard.dropped
        self.step = -1
        self._act = act
        self._returns: defaultdict[str, Decimal] = defaultdict(Decimal)
        self._observations: dict[str, str] = {}
        self._out: list[Outgoing] = []

    @property
    def running(self) -> bool:
        """True if a player has not been sent its end; spectators do not keep a run going."""
        return any(not (player.done or player.watching) for player in self.players.values())

    def is_closed(self, now: float) -> bool:
        """Return True if the port has been open long enough for every client."""
        return all(now >= player.open_until for player in self.players.values())

    # Clients

    def join(self, player: RunMember, now: float) -> None:
        """Add a client."""
        # A late spectator does not get earlier rewards.
        player.heard, player.ret_sent = now, self._rounded(player.key)
        self.players[player.address] = player

    def move(self, old: Address, new: Address | None, token: str = "") -> None:
        """Record that a client has another address, or has left."""
        if (player := self.players.pop(old, None)) is not None and new is not None:
            # A restarted client numbers its actions from 1 again.
            player.address, player.token, player.seq, player.here = new, token, 0, False
            self.players[new] = player

    # Input

    def handle(self, message: packet.ClientMessage, sender: Address, now: float) -> list[Outgoing]:
        """Process a message to the rollout's port, which the guard has accepted."""
        if problem := self._take(message, sender, now):
            self.counts[problem] += 1
        return self._to_send()

    def _take(self, message: packet.ClientMessage, sender: Address, now: float) -> str:
        """Process a message; return why it was dropped, or ""."""
        player = self.players.get(sender)
        if player is None:
            return "not in this run"
        if message.header != self.header:
            return "other instance"
        text, seq = message.action if isinstance(message, packet.Action) else "", player.seq
        # A message without the token is ignored completely. If it counted as a sign of life, a forged sender could keep
        # the run of a lost client going.
        if player.token:
            parts = profile.split_action(text)
            if parts is None or not hmac.compare_digest(parts[0], player.token):
                return "action without token"
            _, port, seq, text = parts
            # Tokens and action numbers belong to the address, not to the run: a delayed action of the last run would
            # count as the newest action of this one.
            if port != self.port:
                return "action of another run"
            player.got += 1
        player.heard, player.here = now, True
        if player.done:
            # Limited to the rate of steps, so that a flood of messages is not answered with a flood.
            if player.due - 1e-6 <= now <= player.open_until:
                self._send(player, now)  # P-18
        elif text:
            # UDP reorders: an older action must not replace a newer one.
            if player.token and seq <= player.seq:
                return "stale action"
            try:
                if not player.watching:
                    self._act(player.key, text)
            except PacketError:
                return "invalid action"  # P-27: the last valid action stays
            # Recorded only here: an invalid action is not acknowledged.
            player.seq = seq
        return ""

    # Output

    def _to_send(self) -> list[Outgoing]:
        out, self._out = self._out, []
        return out

    def _rounded(self, key: str) -> Decimal:
        return self._returns[key].quantize(Decimal(1).scaleb(-self.config.decimals), context=_EXACT)

    def frame(self, results: Mapping[str, Transition], now: float) -> list[Outgoing]:
        """Send what each agent saw in this frame, its observation as text; agents that are missing have left.

        Raises:
            ValueError: A reward is not finite, or too large; nothing was sent.
        """
        for result in results.values():
            # Also true for NaN, for which every comparison is False.
            if not abs(result.reward) < 1e20:
                raise ValueError(f"expected a reward below 1e20, got {result.reward!r}")
        self.step += 1
        for key, result in results.items():
            # With the digits that Python writes for the float: 0.1 counts as 0.1.
            self._returns[key] = _EXACT.add(self._returns[key], Decimal(repr(float(result.reward))))
            self._observations[key] = str(result.observation)  # it is encoded already
        for player in self.players.values():
            known = results.get(player.key)
            # An agent that is missing from the frame has ended. Its client, spectators and late arrivals are told so.
            if known is None or known.terminated:
                self._show(player, now, "terminated")
            else:
                self._show(player, now, "truncated" if known.truncated else None)
        return self._to_send()

    def _show(self, player: RunMember, now: float, end: str | None) -> None:
        """Send a client its agent's last observation, and rewards since the last S5; the last step may follow later."""
        if player.done:
            return
        if end is not None:
            player.open_until = now + self.config.linger
            player.resends = [now + after for after in self.config.resends if after <= self.config.linger]
        elif now < player.due - 1e-6:  # P-21
            self.counts["not sent, rate"] += 1
            return
        ret, extra = self._rounded(player.key), None
        if player.token:
            counts = player.seq, player.got, player.sent + 1
            extra = profile.extra_text(profile.Extra(player.token, *counts, ret, end))
        stamp, reward = max(0, round((now + self.epoch) * 1000)), decimal_text(ret - player.ret_sent)
        seen = self._observations.get(player.key, "none")
        step = packet.Step(self.header, stamp, max(self.step, 0), seen, reward, end is not None, extra)
        player.last = packet.format_message(step)
        # A step that the guard refused was not sent: its reward is added to the next one. The last step is repeated
        # from `last` and has no next one, so it counts as sent.
        if self._send(player, now) or end is not None:
            player.sent += 1
            player.ret_sent = ret

    def _send(self, player: RunMember, now: float) -> bool:
        """Send unless the guard refuses. Count it against the rate, which allows for one frame of unused time."""
        if not self.guard.spend(player.address, len(player.last), now):
            return False
        interval = 1 / self.config.max_rate
        # Counted from when it was due, so that a frame that is slightly early or late is not skipped. After a longer
        # pause it is counted from now, so that not all frames that are caught up are sent.
        player.due = max(player.due, now - interval) + interval
        self._out.append((player.last, player.address))
        return True

    def end(self, now: float) -> list[Outgoing]:
        """Send done=true to every client that has not got it, with its last observation."""
        self.step += 1  # a new number, otherwise it would be taken for a repetition of the last step
        for player in self.players.values():
            self._show(player, now, "truncated")
        return self._to_send()

    def tick(self, now: float) -> list[Outgoing]:
        """Do what is due: repeat done=true, and end a run without players."""
        heard = [player.heard for player in self.players.values() if not (player.done or player.watching)]
        for player in self.players.values():
            if player.resends and now >= player.resends[0]:
                player.resends.pop(0)
                self._send(player, now)
        over = now >= max(heard, default=-math.inf) + self.config.abandoned
        return self.end(now) if over else self._to_send()  # also for spectators of a slot that continued
