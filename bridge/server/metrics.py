"""What a server counts, for Prometheus: `GET http://HOST:METRICS_PORT/metrics`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from bridge.errors import Code, SettingError
from bridge.extras import install_command

__all__ = ["Metrics"]

_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)

# Numbers of `Server.status` that go up and down.
_GAUGES = {
    "connections": "Open connections",
    "worlds": "Worlds",
    "viewers": "Spectators that see pictures",
    "sockets": "Open sockets, each with any number of connections",
    "requests": "Requests being served",
    "queued_bytes": "Bytes of requests and answers that are held",
    "throttled": "Sockets that are read later, for the processor time that they cost",
}


def _count(status: Callable[[], dict[str, Any]], name: str) -> float:
    return float(status()[name])


class Metrics:
    """Counters of one server, and the HTTP port that shows them.

    Args:
        host: The address to listen on.
        port: The port; 0: any free one.
        status: Gives the server's status, see `Server.status`.
        worlds: Gives the names of the worlds that there are.

    Raises:
        SettingError: The package `prometheus-client` is not installed, or the port is in use.
    """

    def __init__(
        self, host: str, port: int, status: Callable[[], dict[str, Any]], worlds: Callable[[], list[str]]
    ) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
        except ImportError as error:
            raise SettingError(f"metrics_port needs the package prometheus-client: {install_command('ops')}") from error
        registry = CollectorRegistry()
        self._guard = threading.Lock()
        self._seen: set[str] = set()
        self._worlds = worlds
        by_world = ["world"]
        self._steps = Counter("bridge_steps", "Steps of environments, a lane each", by_world, registry=registry)
        self._episodes = Counter("bridge_episodes", "Episodes that ended, a lane each", by_world, registry=registry)
        self._errors = Counter("bridge_errors", "Requests answered by an error", ["code"], registry=registry)
        self._latency = Histogram(
            "bridge_step_seconds",
            "Seconds from a Step's arrival to its answer",
            by_world,
            registry=registry,
            buckets=_BUCKETS,
        )
        for name, what in _GAUGES.items():
            gauge = Gauge(f"bridge_{name}", what, registry=registry)
            gauge.set_function(partial(_count, status, name))
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise SettingError(
                f"cannot listen on {host}:{port} for metrics_port: {error}. port 0 takes any free one"
            ) from error
        self.port: int = self._server.server_port

    def stepped(self, world: str, seconds: float, steps: int, episodes: int) -> None:
        """Count a Step that was answered.

        Args:
            world: The world's name.
            seconds: What it took.
            steps: How many lanes it stepped.
            episodes: How many of them ended their episode by it.
        """
        with self._guard:
            if world not in self._seen:
                self._forget_worlds_that_went()
                self._seen.add(world)
        name = world or "default"
        self._steps.labels(name).inc(steps)
        self._latency.labels(name).observe(seconds)
        self._episodes.labels(name).inc(episodes)

    def refused(self, code: int) -> None:
        """Count a request that was answered by an error."""
        self._errors.labels(Code.named(code)).inc()

    def _forget_worlds_that_went(self) -> None:
        # A label for each world that ever was would grow without end.
        for gone in self._seen - set(self._worlds()):
            self._seen.discard(gone)
            for metric in (self._steps, self._episodes, self._latency):
                try:
                    metric.remove(gone or "default")
                except KeyError:
                    continue  # never counted

    def close(self) -> None:
        """Stop listening."""
        server: Any = self._server
        server.shutdown()
        server.server_close()
        self._thread.join(5.0)
