"""`serve_perlert`: publish real-time environments over UDP, for agents and people."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import queue
import re
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import gymnasium

from bridge.core.extras import feature
from bridge.core.server.event_loop import EventLoop
from bridge.core.server.serving import ServerRuntime, ServingThread
from bridge.core.signals import wait_or_stop
from bridge.core.transport.address import is_loopback
from bridge.core.worlds.base import start_error
from bridge.core.worlds.environment import CALL_TIMEOUT, Isolation
from bridge.core.worlds.realtime_options import RealtimeOptions
from bridge.core.worlds.scheduling import PendingResult, Runtime
from bridge.core.worlds.sources.parallel_source import ParallelSource
from bridge.core.worlds.stand_ins import Policy
from bridge.errors import RemoteTimeoutError, RequestError, SettingError
from bridge.perlert.host import Instance, InstanceHost
from bridge.perlert.lobby import LobbyConfig
from bridge.perlert.protocol import packet
from bridge.perlert.protocol.cipher import ServerSeal, check_key
from bridge.perlert.protocol.codec import DECIMALS
from bridge.perlert.protocol.guard import GuardConfig
from bridge.perlert.rollout import RolloutConfig
from bridge.perlert.udp import ServerPorts

if TYPE_CHECKING:
    from bridge.recording.record import Recording

__all__ = ["PerlertServer", "default_name", "make_world", "serve_perlert"]

CATCH_UP = 0.5
"""Seconds of frames that are caught up if the server is late; further frames are skipped."""


class PerlertServer:
    """A running server, which stops at the end of its `with` block.

    `publish` makes the instances, and is awaited in the serving thread; `journal` is closed with the server.
    """

    def __init__(
        self, ports: ServerPorts, guard: GuardConfig, publish: Callable[[PerlertServer], Any], journal: Any = None
    ) -> None:
        self._ports, self._journal = ports, journal
        self.port = ports.port
        """The lobby's UDP port."""
        self._loop = EventLoop()
        self._serving = ServingThread(self._loop)
        self.runtime = ServerRuntime(self._loop, self._serving)
        # Timestamps in S5 are dates. All waiting uses the monotonic clock, which is never set.
        self.host = InstanceHost(guard, self._loop.scheduler, ports, epoch=time.time() - time.monotonic())
        ports.attach(self._loop, self.host)
        self._stop_lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="bridge-perlert", daemon=True)
        self._thread.start()
        try:
            self._do(publish(self), None)
        # Now the thread runs and the ports are bound.
        except BaseException:
            self.stop()
            raise

    def _serve(self) -> None:
        self._serving.serve()
        self._loop.close()

    def _do(self, work: Any, deadline: float | None) -> None:
        """Run a coroutine in the event loop, and wait for its end, at most until the deadline."""
        ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        scheduler = self._loop.scheduler
        scheduler.call_soon_threadsafe(lambda: scheduler.start(work, lambda _, error: ended.put(error)))
        with contextlib.suppress(queue.Empty):
            if (problem := ended.get(timeout=deadline)) is not None:
                raise problem

    @property
    def urls(self) -> list[str]:
        """The URL of each instance."""
        name = "localhost" if self._ports.bind_host in ("0.0.0.0", "::", "") else self._ports.bind_host
        host = f"[{name}]" if ":" in name else name
        return [f"perlert://{host}:{self.port}/{header}" for header in self.host.instances]

    @property
    def url(self) -> str:
        """The URL of the first instance."""
        return self.urls[0]

    def stats(self) -> dict[str, dict[str, int]]:
        """Return counters by instance (runs, frames, late frames, failures, clients), and of dropped datagrams."""
        found = {str(header): instance.stats() for header, instance in list(self.host.instances.items())}
        # Copies, because the event loop's thread keeps counting.
        return {**found, "dropped": dict(Counter(dict(self.host.guard.dropped)) + Counter(dict(self._ports.counts)))}

    def wait(self, timeout: float | None = None) -> bool:
        """Block until Ctrl-C or SIGTERM, or `stop` from another thread; a signal stops the server.

        Args:
            timeout: The longest time to wait, in seconds; None: no limit.

        Returns:
            True if the server has stopped.
        """
        return wait_or_stop(self._serving.finished, self.stop, timeout)

    def stop(self, grace: float = 0.0) -> None:
        """Stop: let runs in progress continue for `grace` seconds, then send done=true to every client.

        Raises:
            RemoteTimeoutError: An environment did not return within 30 more seconds.
        """
        if not 0 <= grace < 1e9:
            raise SettingError(f"expected a grace of 0 seconds or more, got {grace!r}")
        with self._stop_lock:
            if self._serving.finished.is_set():
                return
            self._do(self._end(grace), grace + 30.0)
            self._thread.join(30.0)
            if self._thread.is_alive():
                url = f"perlert://{self._ports.bind_host}:{self.port}"
                raise RemoteTimeoutError(url, "the environment did not return from its call within 30 seconds")

    async def _end(self, grace: float) -> None:
        """In the event loop: end the runs, and close everything."""
        instances, end = self.host.instances.values(), self.host.now() + grace
        while any(instance.lobby.run for instance in instances) and self.host.now() < end:
            turn: PendingResult[None] = PendingResult()
            self._loop.scheduler.call_later(0.01, partial(turn.set_result, None))
            await turn
        for instance in instances:
            instance.stop()
        self._ports.close()
        for instance in instances:
            await instance.close()
        for process in tuple(self.runtime.processes):  # processes of environments that are being restarted
            process.abandon()
        if self._journal is not None:
            self._journal.close()
        self._serving.finish()

    def __enter__(self) -> PerlertServer:
        return self

    def __exit__(self, *problem: object) -> None:
        self.stop()


def default_name(env: Any) -> str:
    """Return the default NAME of an environment: `ALE/Pong-v5` is `pong`."""
    text = env if isinstance(env, str) else getattr(env, "id", None) or getattr(env, "__name__", None) or "world"
    text = re.sub(r"[-_]v[0-9]+\Z", "", re.split(r"[/:.]", str(text))[-1])
    if text == "<lambda>":
        return "world"
    return re.sub(r"[^a-z0-9_.-]+", "_", text.lower()).strip("_")[:64] or "world"


async def make_world(
    env: Any, runtime: Runtime, name: str, stand_in: Any, *, fps: float, journal: Any = None, **settings: Any
) -> Any:
    """Make a world whose episodes begin only on demand, for an environment as `serve_perlert` takes it.

    `stand_in`, given an agent, its last observation and its action space, returns actions while no client acts.
    `settings` are keywords of `ParallelSource`, whose errors this raises too.
    """
    if isinstance(env, str | gymnasium.envs.registration.EnvSpec):
        env = partial(gymnasium.make, env)
    # The lobby decides when the next episode begins, so none begins by itself.
    realtime = RealtimeOptions(fps, default_action=stand_in, catch_up=CATCH_UP, autoreset=False)
    source: Any = ParallelSource(env, realtime=realtime, **settings)
    if journal is not None:
        from bridge.recording.served import recorded

        source = recorded(source, journal)
    return await source.make_world(name, {}, runtime)


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
    start: Literal["all"] | int = "all",
    countdown: float | None = None,
    fps: float = 30.0,
    max_rate: int = 30,
    decimals: int = DECIMALS,
    seed: int | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    key: bytes | str | None = None,
    isolation: Literal["process"] | None = None,
    thread_safe: bool = False,
    guard: GuardConfig | None = None,
    lobby_config: LobbyConfig | None = None,
    rollout_config: RolloutConfig | None = None,
    record: str | os.PathLike[str] | Recording | None = None,
) -> PerlertServer:
    """Publish environments over PERLERT, in the background.

    Args:
        env: A Gymnasium id or EnvSpec, a callable that returns a Gymnasium or PettingZoo environment, or a mapping of
            names to these.
        name: NAME in the URL; None: derived from the id, `cartpole` for `CartPole-v1`.
        instances: Instances of each environment: `cartpole:0`, `cartpole:1`, … on one lobby port.
        env_kwargs: Keywords for making the environment.
        slots: Keys, or keys with kinds, of the agents in order; None: `agent0`, or the PettingZoo agents' names.
        bots: Policies (observation to action), by key, that play while no client holds the slot; or one for all slots;
            or "random"; or the URL of a served policy, `ws://HOST:PORT`.
        default_action: An agent's action until its client's first valid one; a value, or a mapping by key.
        spectators: Slots `spectator0`, … whose clients see the first agent's steps.
        start: "all": when every slot has a ready client or a bot; a number: when this many slots have ready clients. A
            run never starts while a client in an agent's slot is not ready.
        countdown: Seconds from the start condition to the start, announced by messages; None: 3 if a person, in a
            browser or a terminal, is ready, else 0.
        fps: Frames per second.
        max_rate: The most steps per second that are sent to one client.
        decimals: Decimal places of observations and rewards.
        seed: The seed of the first run of instance 0; instance i has seed + i.
        host: The address to bind to.
        port: The lobby's UDP port; 0: any free one.
        key: A pre-shared key of at least 16 random bytes: all messages are encrypted, and only clients with the key can
            play.
        isolation: `process` puts each environment into a process of its own, so that a crash or a slow reset does not
            delay the others; None: the serving thread calls them one after the other.
        thread_safe: True if the environments may be called at the same time: each gets a thread of its own.
        guard: Limits against floods and spoofed addresses.
        lobby_config: Times of the lobby; the keywords override its clients and countdown.
        rollout_config: Times of the runs; the keywords override its fps, max_rate and decimals.
        record: A folder in which every episode is recorded, or `Recording(folder, …)`; None: nothing is recorded.

    Raises:
        SettingError: A keyword has an invalid value, such as wrong `env_kwargs`.
        StartError: Making the environment failed.
        UnsupportedSpaceError: A space has no text form, or an observation may be longer than a datagram.
    """
    if not isinstance(instances, int) or instances < 1:
        raise SettingError(f"expected instances of 1 or more, got {instances!r}")
    if isinstance(env, Mapping) and (name is not None or not env):
        raise SettingError("expected one environment or more, and no name together with a mapping of names to them")
    named = dict(env) if isinstance(env, Mapping) else {default_name(env) if name is None else name: env}
    runs = dataclasses.replace(rollout_config or RolloutConfig(), fps=float(fps), max_rate=max_rate, decimals=decimals)
    clients: Any = None if start == "all" else start
    gathering = dataclasses.replace(lobby_config or LobbyConfig(), clients=clients, countdown=countdown)
    own_process = Isolation.of(isolation, CALL_TIMEOUT, None)
    guard = guard or GuardConfig(datagrams_per_second=max(200.0, 4 * fps))
    if not is_loopback(host) and key is None:
        warnings.warn(
            f"serve_perlert on {host!r} without key=: anyone who can reach it can take part, and anyone who sees the "
            "packets can act for others; give a pre-shared key, or tunnel it",
            stacklevel=2,
        )
    journal: Any = None
    if record is not None:
        with feature("recording", "record="):
            from bridge.recording.served import open_journal
        journal = open_journal(record)
    # Started last: an error above would leave the port bound.
    ports = ServerPorts(host, port, ServerSeal(check_key(key)) if key is not None else None)
    how: dict[str, Any] = {"fps": fps, "env_kwargs": env_kwargs, "isolation": own_process, "thread_safe": thread_safe}
    filling = {"slots": slots, "bots": bots, "default_action": default_action, "spectators": spectators}

    async def publish(server: PerlertServer) -> None:
        for (label, made), number in itertools.product(named.items(), range(instances)):
            header = packet.Header(packet.check_label(label, "name"), number)
            make = partial(make_world, made, server.runtime, str(header), journal=journal, **how)
            instance = Instance(header, make, server.host, runs, None if seed is None else seed + number)
            try:
                await instance.open(**filling, lobby=gathering)
            except RequestError as error:
                raise start_error(f"cannot make the environment of {header}", error) from error

    return PerlertServer(ports, guard, publish, journal)
