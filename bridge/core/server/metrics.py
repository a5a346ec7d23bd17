"""The counters of a server, for Prometheus: `GET http://HOST:METRICS_PORT/metrics`."""

from __future__ import annotations

import contextlib
import platform
import socket
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from bridge.core.callers import Callers
from bridge.core.extras import needed
from bridge.core.logs import reason_of
from bridge.core.server.limits import CoreLimits
from bridge.core.transport.sockets import check_listening
from bridge.errors import Code, ListenError, SettingError
from bridge.version import __version__

__all__ = ["METRICS", "Metric", "Metrics"]

_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)

# Values of `Server.status` that go up and down.
_GAUGES = {
    "connections": "Open connections",
    "viewer_connections": "Open connections of clients that the watch token let in",
    "worlds": "Worlds",
    "slots": "Lanes of the worlds that an agent is in",
    "viewers": "Spectators that see pictures",
    "sockets": "Open sockets, each with any number of connections",
    "requests": "Requests being served",
    "queued_bytes": "Bytes of requests and answers that are held",
    "throttled": "Sockets that are read later, for the processor time that they cost",
    "draining": "Whether the server takes no further worlds: 1 or 0",
}
# Values that only go up.
_COUNTERS = {
    "steps": "Steps of environments, a lane each",
    "episodes": "Episodes that ended, a lane each",
    "failures": "How often an environment raised, or its process ended",
    "refused_tokens": "Clients refused for a wrong or missing token",
    "failed_handshakes": "Failed TLS handshakes",
}
ROLES = ("client", "viewer", "stranger")
_LIMITS = ("max_worlds", "max_connections", "max_viewers")
_CHARGED = "Processor time charged to connections: what is not requests of clients"
_BUILD = "What serves; always 1"
_ERRORS = "Requests answered by an error"
_LATENCY = "Seconds from a Step's arrival to its answer"


class Metric(NamedTuple):
    """A metric of a server, as Prometheus reads it."""

    name: str
    """The name; a counter's ends in `_total`."""
    kind: str
    """gauge, counter or histogram."""
    text: str
    """The description."""
    labels: tuple[str, ...] = ()
    """The names of the labels."""


METRICS = (
    *(Metric(f"bridge_{name}", "gauge", text) for name, text in _GAUGES.items()),
    *(Metric(f"bridge_{name}", "gauge", f"The limit {name}") for name in _LIMITS),
    *(Metric(f"bridge_{name}_total", "counter", text) for name, text in _COUNTERS.items()),
    Metric("bridge_errors_total", "counter", _ERRORS, ("code",)),
    Metric("bridge_charged_seconds_total", "counter", _CHARGED, ("role",)),
    Metric("bridge_step_seconds", "histogram", _LATENCY),
    Metric("bridge_build_info", "gauge", _BUILD, ("version", "python")),
)
"""All metrics of a server, except those of its process, `process_…`. Docs and dashboard are made from this list."""


class _Status:
    """Makes metrics from a server's status, on each request of Prometheus.

    Args:
        status: Returns the status, see `Server.status`.
        limits: The limits of worlds and connections.
    """

    def __init__(self, status: Callable[[], dict[str, Any]], limits: CoreLimits) -> None:
        from prometheus_client import metrics_core

        self._families = metrics_core
        self._status = status
        self._limits = limits

    def collect(self) -> Iterator[Any]:
        """Yield the metrics (the interface of Prometheus' collectors)."""
        gauge, counter = self._families.GaugeMetricFamily, self._families.CounterMetricFamily
        status = self._status()
        for name, what in _GAUGES.items():
            yield gauge(f"bridge_{name}", what, value=float(status[name]))
        for name in _LIMITS:
            yield gauge(f"bridge_{name}", f"The limit {name}", value=float(getattr(self._limits, name)))
        for name, what in _COUNTERS.items():
            yield counter(f"bridge_{name}", what, value=float(status[name]))
        charged = counter("bridge_charged_seconds", _CHARGED, labels=["role"])
        for role in ROLES:
            charged.add_metric([role], status.get(f"charged_{role}", 0.0))
        yield charged
        build = gauge("bridge_build_info", _BUILD, labels=["version", "python"])
        build.add_metric([__version__, platform.python_version()], 1.0)
        yield build


class Metrics:
    """Counters of one server, and the HTTP port that serves them.

    No metric has a label for worlds, because worlds come and go: there would be ever more labels, or the counts of past
    worlds would be missing in every sum.

    Args:
        host: The address to listen on.
        port: The port; 0: any free one.
        status: Returns the server's status, see `Server.status`.
        limits: The server's limits.

    Raises:
        ListenError: The port is in use, or the address is not of this machine.
        SettingError: The package `prometheus-client` is not installed, or the port is invalid.
    """

    def __init__(self, host: str, port: int, status: Callable[[], dict[str, Any]], limits: CoreLimits) -> None:
        check_listening(host, port, "metrics_")
        with needed("metrics_port needs the package prometheus-client", "ops"):
            from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, start_http_server
        registry = CollectorRegistry()
        registry.register(_Status(status, limits))
        ProcessCollector(registry=registry)
        self._errors = Counter("bridge_errors", _ERRORS, ["code"], registry=registry)
        for each in Code:
            if each is not Code.OK:
                self._errors.labels(each.name)  # 0 from the start, so that alerts see the first error as a change
        self._latency = Histogram("bridge_step_seconds", _LATENCY, registry=registry, buckets=_BUCKETS)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise (SettingError if isinstance(error, PermissionError) else ListenError)(
                f"cannot listen on {host}:{port} for metrics_port: {reason_of(error)}; port 0 takes any free one, and "
                "metrics_host names another address of this machine"
            ) from error
        self.port: int = self._server.server_port
        # At most 32 connections: a scrape takes a moment, so the oldest of more sends nothing, and is closed.
        self._server.verify_request = Callers(32).add  # type: ignore[method-assign,assignment]

    def stepped(self, seconds: float) -> None:
        """Record the duration of a Step."""
        self._latency.observe(seconds)

    def refused(self, code: int) -> None:
        """Count a request that was answered with an error."""
        self._errors.labels(Code.named(code)).inc()

    def close(self) -> None:
        """Stop listening."""
        server: Any = self._server
        server.shutdown()
        with contextlib.suppress(OSError):
            server.socket.shutdown(socket.SHUT_RDWR)  # the socket of a forked process, too
        server.server_close()
        self._thread.join(5.0)
