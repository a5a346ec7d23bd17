"""`serve_perlert`: publish environments for agents and people, in real time over UDP."""

from __future__ import annotations

import dataclasses
import secrets
import signal
import threading
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bridge.errors import RemoteTimeoutError, SettingError
from bridge.perlert import lobby, packet, rollout
from bridge.perlert.cipher import ServerSeal, check_key
from bridge.perlert.codec import DECIMALS
from bridge.perlert.guard import GuardConfig
from bridge.perlert.host import Host, Instance, Policy
from bridge.perlert.udp import ServerLoop
from bridge.perlert.worlds import World, default_name, make_world
from bridge.transport.address import is_loopback

__all__ = ["PerlertServer", "serve_perlert", "serve_perlert_until_signal"]


class PerlertServer:
    """A running server: a context manager that stops it at the end.

    Attributes:
        port: The lobby's UDP port.
    """

    def __init__(self, loop: ServerLoop, host: Host, worlds: Sequence[World]) -> None:
        self._loop, self._host, self._worlds = loop, host, worlds
        self.port = loop.port
        self._stop_lock = threading.Lock()

    @property
    def urls(self) -> list[str]:
        """The URL of each instance."""
        name = "localhost" if self._loop.bind_host in ("0.0.0.0", "::", "") else self._loop.bind_host
        host = f"[{name}]" if ":" in name else name
        return [f"perlert://{host}:{self.port}/{header}" for header in self._host.instances]

    @property
    def url(self) -> str:
        """The URL of the first instance."""
        return self.urls[0]

    def stats(self) -> dict[str, dict[str, int]]:
        """Return counters by instance (runs, frames, late frames, failures, clients), and of what was dropped."""
        found: dict[str, dict[str, int]] = {}
        for header, instance in list(self._host.instances.items()):
            found[str(header)] = {
                "runs": instance.runs,
                "frames": instance.frames,
                "late_frames": instance.late_frames,
                "failures": sum(instance.failures.values()),
                "clients": len(instance.lobby.clients),
            }
        dropped: Counter[str] = Counter()
        for counts in (self._host.guard.dropped, self._host.counts, self._loop.counts):
            dropped.update(dict(counts))  # a copy: the loop's thread goes on counting
        found["dropped"] = dict(dropped)
        return found

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the server is stopped; return whether it was. `timeout` in seconds; None: for ever.

        Raises:
            RuntimeError: The loop ended by an error, which is its cause.
        """
        ended = self._loop.finished.wait(timeout)
        if ended and self._loop.failure is not None:
            raise RuntimeError(f"the server ended by an error: {self._loop.failure!r}") from self._loop.failure
        return ended

    def stop(self, grace: float = 0.0) -> None:
        """Stop: runs that are on may go on for `grace` seconds, then every client is sent done=true.

        Raises:
            RemoteTimeoutError: An environment did not return within 30 seconds more.
        """
        if not 0 <= grace < 1e9:
            raise SettingError(f"expected a grace of 0 seconds or more, got {grace!r}")
        with self._stop_lock:
            self._loop.stop(grace)
            if not self._loop.join(grace + 30.0):
                raise RemoteTimeoutError(self.url, "the environment did not return from its step within 30 seconds")

    def __enter__(self) -> PerlertServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.stop()


def _policy(start: str | int | lobby.StartPolicy, countdown: float) -> lobby.StartPolicy:
    if isinstance(start, lobby.StartPolicy):
        return start
    if start == "all":
        return lobby.StartPolicy(None, countdown)
    if isinstance(start, int) and not isinstance(start, bool):
        return lobby.StartPolicy(start, countdown)
    raise SettingError(f'expected start="all", a number of clients or a StartPolicy, got {start!r}')


def _bots(bots: Any, world: World) -> dict[str, Policy]:
    if bots is None:
        return {}
    keys = list(world.agents)
    given = dict(bots) if isinstance(bots, Mapping) else dict.fromkeys(keys, bots)
    found: dict[str, Policy] = {}
    for key, policy in given.items():
        if policy == "random" and key in keys:
            space = world.spaces(key)[1]
            found[key] = lambda observation, space=space: space.sample()  # type: ignore[misc]
        elif callable(policy):
            found[key] = policy
        else:
            raise SettingError(
                f'expected bots as policies (observation to action) or "random", got {policy!r} for {key!r}'
            )
    return found


def serve_perlert(
    env: Any,
    *,
    name: str | None = None,
    instances: int = 1,
    env_kwargs: Mapping[str, Any] | None = None,
    slots: Mapping[str, str] | Sequence[str] | None = None,
    bots: Mapping[str, Policy | str] | Policy | str | None = None,
    default_action: Any = None,
    spectators: int = 0,
    start: str | int | lobby.StartPolicy = "all",
    countdown: float = 0.0,
    fps: float = 30.0,
    max_rate: int = 30,
    decimals: int = DECIMALS,
    seed: int | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    key: bytes | str | None = None,
    guard: GuardConfig | None = None,
    lobby_config: lobby.LobbyConfig | None = None,
    rollout_config: rollout.RolloutConfig | None = None,
) -> PerlertServer:
    """Publish environments over PERLERT; starts in the background.

    Args:
        env: A Gymnasium id or EnvSpec, a callable that returns a Gymnasium or PettingZoo parallel environment, or a
            mapping of names to these.
        name: NAME in the URL; None: made from the id, `cartpole` for `CartPole-v1`.
        instances: How many of each: `cartpole:0`, `cartpole:1`, … on one lobby port, each with an environment of its
            own.
        env_kwargs: Keywords for the environment's maker.
        slots: Keys, or keys with kinds, of the agents in order; None: `agent0`, or the PettingZoo agents' names.
        bots: Policies (observation to action) by key that play while nobody holds the slot; one for all; or "random".
        default_action: What an agent does until its client's first valid action; a value, or a mapping by key.
        spectators: Slots `spectator0`, … whose clients see the first agent's steps.
        start: "all": when every slot has a ready client or a bot; a number: when so many slots have a ready client.
            Never while a registered client is not ready.
        countdown: Seconds from then to the start, announced by messages.
        fps: Frames a second.
        max_rate: Steps a second that are sent to one client.
        decimals: Decimal places of observations and rewards.
        seed: Of the first run of instance 0; instance i: seed + i.
        host: Address to bind to.
        port: The lobby's UDP port; 0: any free one.
        key: A pre-shared key of 16 random bytes or more: all messages are enciphered, and only who has it takes part.
        guard: Limits against floods and spoofed addresses.
        lobby_config: Times of the lobby.
        rollout_config: Times of the runs; its fps, max_rate and decimals are those of the keywords.

    Raises:
        SettingError: A keyword has a value that cannot be served.
        UnsupportedSpaceError: A space has no text form, or an observation may be longer than a datagram.
    """
    if not isinstance(instances, int) or instances < 1:
        raise SettingError(f"expected instances of 1 or more, got {instances!r}")
    if not isinstance(decimals, int) or not 0 <= decimals <= 12:
        raise SettingError(f"expected decimals from 0 to 12, got {decimals!r}")
    if isinstance(env, Mapping):
        if name is not None:
            raise SettingError("expected no name together with a mapping of names to environments")
        named = dict(env)
    else:
        named = {name if name is not None else default_name(env): env}
    if not named:
        raise SettingError("expected one environment or more, got an empty mapping")
    run_config = dataclasses.replace(
        rollout_config or rollout.RolloutConfig(), fps=float(fps), max_rate=max_rate, decimals=decimals
    )
    guard = guard or GuardConfig(datagrams_per_second=max(200.0, 4 * fps))
    seal = ServerSeal(check_key(key)) if key is not None else None
    if not is_loopback(host) and key is None:
        warnings.warn(
            f"serve_perlert on {host!r} without key=: everybody who can send to it can take part, and addresses can be "
            "spoofed; give a pre-shared key, or tunnel it",
            stacklevel=2,
        )
    loop = ServerLoop(host, port, seal)
    worlds: list[World] = []
    try:
        the_host = Host(guard, open_port=loop.open_port, close_port=loop.close_port)
        for label, maker in named.items():
            for number in range(instances):
                world = make_world(maker, env_kwargs, slots)
                worlds.append(world)
                defaults = default_action
                if default_action is not None and not (
                    isinstance(default_action, Mapping) and set(default_action) <= set(world.agents)
                ):
                    defaults = dict.fromkeys(world.agents, default_action)
                the_host.add(
                    Instance(
                        packet.Header(packet.check_label(label, "name"), number),
                        world,
                        the_host.guard,
                        open_port=the_host.open_port,
                        close_port=the_host.close_port,
                        new_token=lambda: secrets.token_hex(6),
                        bots=_bots(bots, world),
                        spectators=spectators,
                        policy=_policy(start, countdown),
                        lobby_config=lobby_config,
                        rollout_config=run_config,
                        default_actions=defaults,
                        seed=None if seed is None else seed + number,
                        epoch=time.time() - time.monotonic(),
                    )
                )
    except BaseException:
        loop.close_unstarted()
        for world in worlds:
            world.close()
        raise

    def close_worlds() -> None:
        for world in worlds:
            world.close()

    loop.start(the_host, close_worlds)
    return PerlertServer(loop, the_host, worlds)


def serve_perlert_until_signal(
    env: Any, *, say: Callable[[str], None] = print, grace: float = 0.0, **settings: Any
) -> None:
    """Serve until SIGTERM or Ctrl-C, for `bridge serve ENV_ID --perlert PORT`; say the URLs and how to connect.

    Args:
        env: As for `serve_perlert`.
        say: Takes lines for people.
        grace: Seconds that runs may go on after the signal.
        settings: Keywords of `serve_perlert`.
    """
    stopped = threading.Event()
    previous = {number: signal.signal(number, lambda *_: stopped.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with serve_perlert(env, **settings) as server:
            for url in server.urls:
                say(f"serving {url}")
            say(f"play:   bridge lobby {server.url}")
            say(f'agents: bridge.make_remote("{server.url}")')
            while not stopped.is_set() and not server.wait(0.2):
                pass
            server.stop(grace)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
