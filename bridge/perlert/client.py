"""`PerlertEnv`: one agent of a PERLERT server as a `gymnasium.Env`, in real time."""

from __future__ import annotations

import contextlib
import functools
import itertools
import secrets
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import gymnasium
from gymnasium.utils import EzPickle

from bridge.core.back_off import checked_wait, until_up
from bridge.core.client.turns import ConflictDetector
from bridge.core.ownership import forget_in_child
from bridge.core.worlds.group import neutral_action
from bridge.errors import (
    ClosedError,
    ConnectError,
    InvalidActionError,
    PacketError,
    PeerError,
    RemoteTimeoutError,
    ResetNeededError,
    SettingError,
)
from bridge.perlert.address import PerlertAddress, parse_perlert_address
from bridge.perlert.player import Player, PlayerConfig
from bridge.perlert.player_run import Stepped
from bridge.perlert.protocol.cipher import ClientSeal, check_key
from bridge.perlert.protocol.codec import Space, TextCodec
from bridge.perlert.protocol.packet import MAX_CLIENT_MESSAGE, Message, Slot, check_label
from bridge.perlert.protocol.profile import MAX_NAME
from bridge.perlert.udp import MOST_WAITING, ClientPort

__all__ = ["PerlertClient", "PerlertEnv", "check_names", "make_perlert_env"]


class PerlertClient:
    """A player on a socket: the common part of `PerlertEnv`, `gymnasium-bridge lobby` and the gateway.

    `agent` is the slot (None: the URL's, or the first free one; empty: none), `tag` the client's name (None: the URL's,
    or a random one), `key` the pre-shared key, and `settings` are those of `player.Player`.

    Raises:
        ConnectError: The host has no address.
        SettingError: The key or the tag is invalid.
    """

    def __init__(
        self,
        address: PerlertAddress,
        *,
        agent: str | None = None,
        tag: str | None = None,
        key: bytes | str | None = None,
        **settings: Any,
    ) -> None:
        agent = agent if agent is not None else address.agent
        tag = tag if tag is not None else (address.tag or f"bridge-{secrets.token_hex(3)}")
        check_names(tag, agent or None)
        seal = ClientSeal(check_key(key)) if key is not None else None
        self.address = address
        self.port = ClientPort(address.url, address.host, address.port, seal)
        self.player = Player(address.header, self.port.server, tag=tag, agent=agent, **settings)
        forget_in_child(self)

    def after_fork(self) -> None:
        """Leave the slot and the port to the parent process, after a fork."""
        self.port.close()

    def pump(self) -> None:
        """Read the datagrams that have arrived and send those that are due; do not wait."""
        # The number is limited, because others could send faster than this loop reads.
        for datagram, sender, age in itertools.islice(iter(self.port.read, None), MOST_WAITING):
            now = time.monotonic()
            # The time of arrival, not of reading: the agent may have computed for seconds in between, and that is not a
            # delay of the network.
            self.port.send(self.player.receive(datagram, sender, now, now - age))
        now = time.monotonic()
        if self.player.wake() <= now:
            self.port.send(self.player.tick(now))

    def wait(self, deadline: float) -> None:
        """Wait until a datagram arrives, something is due, or the deadline is reached; then call `pump`."""
        self.port.wait(min(self.player.wake(), deadline) - time.monotonic())
        self.pump()

    def close(self) -> None:
        """Leave the slot and close the socket; may be called twice."""
        if not self.port.closed:
            self.port.send(self.player.leave())
            self.port.close()

    def __del__(self) -> None:
        # Otherwise the server would keep the slot until its own timeout.
        if "player" in self.__dict__:  # False if __init__ raised
            self.close()


def check_names(tag: str, agent: str | None = None) -> None:
    """Raise SettingError unless the client's name and the slot's key are valid."""
    try:
        check_label(tag, "tag", empty=True)
        if agent is not None:
            check_label(agent, "key")
    except PacketError as error:
        raise SettingError(str(error)) from error
    if len(tag.encode()) > MAX_NAME:
        raise SettingError(f"expected a tag of at most {MAX_NAME} bytes, got {len(tag.encode())}")


class PerlertEnv(gymnasium.Env[Any, Any], EzPickle):
    """One slot of a PERLERT server, as an environment.

    `reset` takes the slot, declares the client ready, waits for the start, and returns the first observation that
    arrives. `step` sends the action and waits for the next observation. The simulation runs at its own rate, whether or
    not `step` is called, so steps may be skipped; their rewards are added to the next one. An episode is a run of the
    server. The server ignores `seed`.

    `info`: `step` (the server's step), `skipped` (steps received but not returned), `timestamp`, `ack` and `seq` (the
    newest action that the server had applied; the newest one sent), `return`, `lost` (the end of the run was not
    received) and `perlert`, the network's statistics (`bridge.perlert.player_run.Stats`).

    Args:
        url: `perlert://HOST:PORT/NAME:NUMBER`.
        agent: The slot's key; None: the first free one.
        tag: The client's name in the lobby.
        observation_space: Needed if the server is not ours; otherwise the server's is used.
        action_space: As for `observation_space`.
        key: The pre-shared key.
        token: The `token` of a client that has ended without leaving: its slot and its run are taken over.
        use_profile: Offer sequence numbers, acknowledgements and running returns to the server (docs/perlert.md).
        timeout: Seconds to wait for a response of the server or for the next step.
        start_timeout: Seconds for which `reset` waits for the start of the simulation.
        wait_for_server: Seconds to wait for a server that is not ready yet, or whose name is not known yet, if longer
            than `timeout`.
        config: The client's intervals and timeouts.

    Raises:
        AddressError: The URL cannot be read.
        ConnectError: No server answers.
        SettingError: The server does not send its spaces and they were not given, or the slot is not available.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  gymnasium's own name and type

    def __init__(
        self,
        url: str,
        *,
        agent: str | None = None,
        tag: str | None = None,
        observation_space: Space | None = None,
        action_space: Space | None = None,
        key: bytes | str | None = None,
        token: str | None = None,
        use_profile: bool = True,
        timeout: float = 10.0,
        start_timeout: float = 60.0,
        config: PlayerConfig | None = None,
        wait_for_server: float = 0.0,
    ) -> None:
        # A copy connects by itself, as another client.
        EzPickle.__init__(self, **{key: value for key, value in locals().items() if key not in ("self", "token")})
        for name, value in (("timeout", timeout), ("start_timeout", start_timeout)):
            if not 0 < value < 1e9:
                raise SettingError(f"expected a positive {name} in seconds, got {value!r}")
        check_names(tag or "", agent)
        self.url = url
        self._timeout, self._start_timeout = timeout, start_timeout
        self._conflicts = ConflictDetector("environment")
        self._closed = self._leaving = self.in_episode = False
        """True if `step` may be called."""
        self._newest: Stepped | None = None
        self._came = 0
        """Steps received but not returned, except the newest."""
        self._told = Decimal(0)
        """The sum of the rewards that `step` has returned."""
        self.messages: list[str] = []
        """The newest text messages of the server, at most 100."""
        config = config or PlayerConfig()
        settings: dict[str, Any] = {"use_profile": use_profile, "former": token or "", "config": config}
        # Ready only in `reset`: otherwise a run would begin while nobody acts.
        address, began = parse_perlert_address(url), time.monotonic()
        make = functools.partial(PerlertClient, address, agent=agent, tag=tag, key=key, ready=False, **settings)
        self._client = until_up(make, checked_wait(wait_for_server))
        try:
            # A UDP server that is not ready yet does not answer at all.
            self._await_lobby(max(timeout, began + wait_for_server - time.monotonic()))
            self._settle(observation_space, action_space)
        except BaseException:
            self._client.close()
            raise

    @property
    def agent(self) -> str | None:
        """The key of our slot."""
        return self._client.player.key

    @property
    def token(self) -> str:
        """The token that identifies this client, for `PerlertEnv(url, token=…)`; empty without the profile."""
        return self._client.player.token

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The lobby as last received."""
        return tuple(self._client.player.slots.values())

    @property
    def stats(self) -> dict[str, int | float | None]:
        """The network's statistics of this run."""
        return {**self._client.player.stats.as_dict(), "cut": self._client.port.cut}

    def _await_lobby(self, seconds: float) -> None:
        """Wait for the first message of the lobby."""
        me = self._client.player
        self._client.pump()
        self._wait_while(lambda: not me.slots, time.monotonic() + seconds, "no PERLERT lobby answered")

    def _settle(self, observation_space: Space | None, action_space: Space | None) -> None:
        """Take a slot, and determine the spaces."""
        me, deadline = self._client.player, time.monotonic() + self._timeout
        soon = min(deadline, time.monotonic() + 2.0)
        while me.agent is not None and me.agent not in me.slots:  # the lobby may be split into several datagrams
            if time.monotonic() >= soon:
                raise SettingError(f"{self.url}: {me.waits_for()}")
            self._client.wait(soon)
        self._wait_while(lambda: not (me.registered and me.settled), deadline, "no slot could be had")
        if me.offer is not None:
            observation_space = observation_space or me.offer.observation_space
            action_space = action_space or me.offer.action_space
            self.metadata = {**self.metadata, "render_fps": me.offer.fps}
        if observation_space is None or action_space is None:
            raise SettingError(
                f"{self.url} does not tell its spaces; give them: "
                "make_remote(url, observation_space=Box(…), action_space=Discrete(…))"
            )
        self.observation_space, self.action_space = observation_space, action_space
        self._observations = TextCodec(observation_space)
        self._actions = TextCodec(action_space, named=False, decimals=None)
        me.action = self._actions.encode(neutral_action(action_space))

    def _wait_while(self, waits: Callable[[], object], deadline: float, problem: str) -> None:
        """Process the network while `waits()` is true; raise an error with the problem at the deadline."""
        while waits():
            if time.monotonic() >= deadline:
                error = RemoteTimeoutError if self._client.player.slots else ConnectError
                raise error(self.url, f"{problem} within the deadline: {self._client.player.waits_for()}")
            self._client.wait(deadline)

    def check_open(self) -> None:
        """Raise ClosedError if the environment is closed, or was made before this process was forked."""
        if self._closed or self._client.port.closed:
            problem = "a closed one" if self._closed else "one of another process, which keeps its slot"
            raise ClosedError(f"expected an open environment, got {problem}; make a new one")

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[Player]:
        """Yield the player, with received events processed; raise ConcurrentUseError for a second thread."""
        self.check_open()
        with self._conflicts:
            self._client.pump()
            self._take_events()
            yield self._client.player

    def _take_events(self) -> bool:
        """Process the events since the last call, and return True if one of them was a step."""
        before, events = self._came, self._client.player.events
        while events:
            event = events.popleft()
            if isinstance(event, Stepped):
                self._newest, self._came = event, self._came + 1
            elif isinstance(event, Message):
                self.messages = [*self.messages[-99:], event.text]
        return self._came > before

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the next run and return the first observation that arrives.

        If a run is in progress, this leaves it and waits for its end, because the lobby starts the next run after it.

        Args:
            seed: Seeds `np_random`; the protocol does not send it to the server.
            options: None or empty.

        Raises:
            RemoteTimeoutError: The run did not begin within `start_timeout`; the message says what is missing.
        """
        super().reset(seed=seed)
        if options:
            raise SettingError(f"expected no options, because PERLERT carries none, got {options!r}")
        with self._exclusive() as me:
            deadline = time.monotonic() + self._start_timeout
            # If the wait fails, the next call continues it: the run that was left must not count as the next one.
            self._leaving, self.in_episode = self._leaving or self.in_episode, False
            self._wait_while(lambda: self._leaving and me.in_run, deadline, "the run that was left did not end")
            self._leaving = False
            self._take_events()
            # Rewards before the first observation belong to the first step, and so does a run that has ended already.
            self._came, self._told = 0, Decimal(0)
            self._client.port.send(me.set_ready(True, time.monotonic()))
            self._wait_while(lambda: not self._take_events(), deadline, "no run started")
            self.in_episode = True
            return self._observed()

    def action_text(self, action: Any) -> str:
        """Return an action as it is sent; raise InvalidActionError if `step` would."""
        if not self.action_space.contains(action):
            raise InvalidActionError(f"expected an action of {self.action_space}, got {action!r}")
        text = self._actions.encode(action)
        most = MAX_CLIENT_MESSAGE - 150  # everything else in a message takes at most 127 bytes
        if len(text) > most:
            raise InvalidActionError(f"expected an action of at most {most} bytes, got {len(text)}")
        return text

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Send the action, and return the next observation and the sum of all rewards since the last one.

        Raises:
            ResetNeededError: No episode was begun, or it is over.
            InvalidActionError: The action is not in the action space; nothing was sent.
            RemoteTimeoutError: No step came within `timeout`.
        """
        with self._exclusive() as me:
            if not self.in_episode or self._newest is None:
                raise ResetNeededError("expected a running episode, got none or one that is over; call reset()")
            text = self.action_text(action)
            # The end may have arrived between two calls. This step returns it, though its action has no effect.
            if not self._newest.done:
                now = time.monotonic()
                self._client.port.send(me.act(text, now))
                self._wait_while(lambda: not self._take_events(), now + self._timeout, "no step came")
            step = self._newest
            # Computed from the returns, because the queue of steps is limited.
            reward, self._told = float(step.ret - self._told), step.ret
            self.in_episode = not step.done
            observation, info = self._observed()
            return observation, reward, step.done and not step.truncated, step.truncated, info

    def _observed(self) -> tuple[Any, dict[str, Any]]:
        """Return the observation and the infos of the newest step; the infos count the steps since the last one."""
        step, me = self._newest, self._client.player
        assert step is not None
        skipped, self._came = max(self._came - 1, 0), 0
        info = {name: getattr(step, name) for name in ("step", "timestamp", "ack", "lost")}
        info |= {"skipped": skipped, "seq": me.seq, "return": float(step.ret), "perlert": self.stats}
        try:
            return self._observations.decode(step.observation, check=False), info
        except PacketError as error:
            raise PeerError(self.url, f"the observation does not fit the observation space: {error}") from error

    def close(self) -> None:
        """Leave the slot and close the socket; may be called twice."""
        self._closed = True
        self._client.close()


def make_perlert_env(url: str, *, agent: str | None = None, **settings: Any) -> PerlertEnv:
    """Return the environment behind a `perlert://` URL.

    Args:
        url: `perlert://HOST:PORT/NAME:NUMBER`.
        agent: The slot's key; None: the first free one.
        settings: Other keywords of `PerlertEnv`.

    Raises:
        AddressError, ConnectError, SettingError: As for `PerlertEnv`.
    """
    return PerlertEnv(url, agent=agent, **settings)
