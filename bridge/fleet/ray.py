"""Fleets on Ray: servers in detached actors on a cluster, which clients find through a directory.

    from bridge.fleet.ray import launch, attach

Ray places the servers, and restarts them after the loss of a process or a machine. A restarted server has a new URL.
A `Fleet` is the directory that `make_vec_remote` watches, so clients find it by themselves.
"""

from __future__ import annotations

import contextlib
import inspect
import secrets
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from bridge.core.client.endpoints import Endpoint
from bridge.core.extras import imported_from, provided
from bridge.core.keywords import check_counts, grouped
from bridge.core.logs import Progress
from bridge.core.server.auth import Auth
from bridge.core.server.limits import CoreLimits
from bridge.core.transport.credentials import Token, checked_tls
from bridge.core.worlds.recipe import EnvLike
from bridge.core.worlds.registered import registered_specs
from bridge.errors import ConnectionLostError, RemoteError, RemoteTimeoutError, SettingError
from bridge.fleet.plan import FleetStatus, ports_clash
from bridge.fleet.ray_actors import NAMESPACE, FleetSettings, Supervisor, actor_options, server_prefix

with imported_from("fleets on Ray need the package ray", "ray"):
    import ray
    import ray.cloudpickle
    import ray.util

__all__ = ["Fleet", "attach", "launch"]

# Ray's control store keeps an argument of up to 100 KiB itself, 10 MiB in all; larger ones are lost with their creator.
_PIECE = 64 * 1024
_MOST_BYTES = 8 * 1024 * 1024
_TIMEOUT = 20.0
_POLL = 0.1
_FLEETS_OWN = ("host", "port", "unix_path", "processes", "start", "token_file")


@grouped(**provided("groups"))
def launch(
    env: EnvLike,
    *,
    servers: int,
    num_envs: int = 1,
    name: str | None = None,
    slots_per_server: int | None = None,
    cpus_per_server: float = 1.0,
    limits: CoreLimits | None = None,
    ray_options: Mapping[str, Any] | None = None,
    timeout: float = 120.0,
    **serve_options: Any,
) -> Fleet:
    """Start servers on a Ray cluster, and return when all of them serve.

    If the program has not connected to Ray, this calls `ray.init()`, which connects to a cluster or starts Ray on this
    machine. The servers outlive this program, unless the fleet is used as a context manager, which shuts it down.

    Examples:
        with launch("CartPole-v1", servers=100, num_envs=64, name="cart") as fleet:
            envs = BlockingReset(make_vec_remote(fleet, num_envs=6400))

    Args:
        env: The environment, as for `serve_gym`. A callable is pickled by Ray; the machines of the cluster need the
            modules that it imports, and this package (`runtime_env`).
        servers: The number of servers.
        num_envs: The lanes of each world.
        name: The fleet's name in the cluster, for `attach`; None: a generated one.
        slots_per_server: The slots that a server carries, a multiple of `num_envs`; None: those of one world.
        cpus_per_server: The CPUs that Ray reserves for each server.
        limits: The limits of each server. `drain_timeout` is the time that clients have to leave a server when the
            fleet is made smaller; it must not be less than the longest episode if no episode may be cut off. None: the
            defaults of `Limits`, with `drain_timeout=600`.
        ray_options: Further options of the servers' actors, such as `{"num_gpus": 0.1, "runtime_env": {…}}`.
        timeout: Seconds to wait until all servers serve.
        serve_options: Further keywords of `serve_gym`. Without `token`, one is generated; with
            `auth=Auth(insecure=True)`, clients need none.

    Returns:
        The fleet, a directory for `make_vec_remote`.

    Raises:
        SettingError: An argument is out of its range, the name is taken, the environment cannot be pickled, or a server
            cannot start. No actor is left running.
        RemoteTimeoutError: The cluster has no room for all servers within `timeout` seconds. No actor is left running.
    """
    check_counts(servers=servers, num_envs=num_envs)
    slots = num_envs if slots_per_server is None else slots_per_server
    check_counts(slots_per_server=slots)
    if slots % num_envs:
        raise SettingError(f"expected slots_per_server to be a multiple of num_envs={num_envs}, got {slots}")
    limits = CoreLimits(drain_timeout=600.0) if limits is None else limits
    options = {**_checked_options(serve_options), "num_envs": num_envs, "limits": limits}
    token = _token(options)
    name = f"fleet-{secrets.token_hex(4)}" if name is None else name
    if not isinstance(name, str) or not name or "/" in name:
        raise SettingError(f"expected the name of a fleet to be a text without '/', got {name!r}")
    of_actors = {"num_cpus": cpus_per_server, **(ray_options or {})}
    settings = FleetSettings(name, num_envs, slots, token, limits.drain_timeout, of_actors)
    if not ray.is_initialized():
        ray.init()
    clash = ports_clash(options.get("metrics_port"), servers, sum(node["Alive"] for node in ray.nodes()))
    if clash:
        raise SettingError(clash)
    return _start(settings, servers, _pieces(env, options), timeout)


def _start(settings: FleetSettings, servers: int, pieces: list[bytes], timeout: float) -> Fleet:
    """Start a supervisor and wait for its servers; if they do not start, end all actors."""
    name = settings.name
    if _find(name) is not None:
        raise SettingError(f"there is a fleet {name!r} already: use attach({name!r}), or shut it down, or another name")
    supervisor: Any = ray.remote(Supervisor)
    # It reserves no CPU, because the servers may need all of them. Ray repeats calls that were lost when it ended,
    # after it is restarted.
    supervisor.options(**actor_options(name, num_cpus=0, max_task_retries=-1)).remote(settings, servers, *pieces)
    fleet = Fleet(name, owner=True)
    try:
        fleet.wait(timeout)
    except BaseException:
        with contextlib.suppress(RemoteError):  # the first error is the one to report
            fleet.shutdown()
        raise
    return fleet


def attach(name: str) -> Fleet:
    """Return a fleet that another program launched on the cluster. Leaving its `with` block does not shut it down.

    Raises:
        SettingError: The cluster has no fleet of this name.
    """
    _require(name)
    return Fleet(name)


class Fleet:
    """The servers of a fleet: a directory for `make_vec_remote`. Made by `launch` and `attach`; can be pickled.

    Args:
        name: Its name.
        owner: Whether leaving its `with` block shuts down the fleet.
    """

    def __init__(self, name: str, *, owner: bool = False) -> None:
        self.name = name
        """Its name."""
        self._owner = owner
        self._handle: Any = None
        self._asked = False
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy is not an owner: the end of its `with` block does not shut down the fleet.
        return Fleet, (self.name,)

    def __repr__(self) -> str:
        return f"Fleet({self.name!r})"

    def endpoints(self) -> list[Endpoint]:
        """Return the servers that answer, including those that drain.

        Raises:
            OSError: The fleet's supervisor does not answer.
        """
        found: list[Endpoint] = self._ask("endpoints")
        return found

    def status(self) -> FleetStatus:
        """Return the status of the servers as last reported to the supervisor; `age` is that many seconds."""
        found: FleetStatus = self._ask("status")
        return found

    def scale(self, servers: int, *, force: bool = False) -> None:
        """Change the number of servers. Return at once; `wait` waits until the change is complete.

        Surplus servers drain: they accept no more worlds, and their clients move to the other servers; single
        environments move at the end of their episodes. The servers with the fewest slots in use drain first.

        Args:
            servers: The new number.
            force: Accept a number that is too small for the clients' slots; each server then carries more.

        Raises:
            SettingError: The clients need more servers.
        """
        check_counts(servers=servers)
        refused = self._ask("scale", servers, bool(force))
        if refused:
            raise SettingError(refused)

    def wait(self, timeout: float = 120.0) -> None:
        """Wait until exactly the wanted number of servers exist, and all of them serve.

        At a terminal, progress is shown if this takes more than a moment.

        Raises:
            RemoteTimeoutError: Not within `timeout` seconds; the message says how many serve.
            SettingError: No server can start; the message says why.
        """
        deadline = time.monotonic() + timeout
        progress = Progress()
        while True:
            try:
                status = self.status()
            except (ConnectionLostError, RemoteTimeoutError):  # the supervisor is starting or restarting
                progress.tell(f"fleet {self.name!r}: waiting for Ray to start the process that starts the servers")
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_POLL)
                continue
            if status.ready:
                return
            serving = sum(server.state == "serving" for server in status.servers)
            # If some servers serve, the environment can be made, and Ray restarts the others.
            if status.problem and not serving:
                raise SettingError(f"the servers of the fleet {self.name!r} cannot start: {status.problem}")
            if time.monotonic() >= deadline:
                raise RemoteTimeoutError(self._url, f"{self._lack(status, serving)} within {timeout:g} s")
            problem = f"; {status.problem}" if status.problem else ""
            progress.tell(f"fleet {self.name!r}: waiting, {serving} of {status.wanted} servers serve{problem}")
            time.sleep(_POLL)

    def _lack(self, status: FleetStatus, serving: int) -> str:
        if len(status.servers) > status.wanted:
            return f"expected {status.wanted} servers, got {len(status.servers)}, of which some still drain,"
        if status.problem:
            return (
                f"expected {status.wanted} servers to serve, got {serving}, since {status.problem}; they did not start"
            )
        free = ray.available_resources().get("CPU", 0.0)
        return (
            f"expected {status.wanted} servers to serve, got {serving}; the cluster has {free:g} CPUs free, so add "
            "machines, or give a smaller servers= or cpus_per_server=; they did not start"
        )

    def shutdown(self, timeout: float = 60.0) -> None:
        """End all servers and their supervisor; clients lose their slots. Has no effect if they have ended already."""
        try:
            if _find(self.name) is not None:
                self._ask("shutdown", timeout=timeout)
        finally:
            # The supervisor goes first, because it would restart servers. If it answers, it has ended the servers
            # itself.
            prefix = server_prefix(self.name)
            for name in [self.name, *(name for name in _names() if name.startswith(prefix))]:
                handle = _find(name)
                if handle is not None:
                    ray.kill(handle, no_restart=True)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owner:
            self.shutdown()

    @property
    def _url(self) -> str:
        return f"fleet {self.name!r}"

    def _ask(self, method: str, *arguments: Any, timeout: float = _TIMEOUT) -> Any:
        """Call a method of the supervisor, which may be restarting."""
        with self._lock:
            if self._asked and not ray.is_initialized():  # a thread that reads a directory must not connect
                raise ConnectionLostError(self._url, "this program has left the Ray cluster, by ray.shutdown()")
            if self._handle is None:
                self._handle = _require(self.name)
                self._asked = True
            handle = self._handle
        try:
            return ray.get(getattr(handle, method).remote(*arguments), timeout=timeout)
        except ray.exceptions.GetTimeoutError as error:
            raise RemoteTimeoutError(self._url, f"its supervisor did not answer within {timeout:g} s") from error
        except ray.exceptions.RayActorError as error:
            with self._lock:
                # The next actor of this name may be another one.
                self._handle = None
            raise ConnectionLostError(self._url, f"its supervisor is gone: {error}") from error


def _names() -> list[str]:
    """Return the names of all actors of fleets on the cluster."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]


def _find(name: str) -> Any:
    """Return the supervisor of a fleet, or a server; None if there is none of this name."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _require(name: str) -> Any:
    """Return the supervisor of a fleet; connect the program to the cluster first if it is not."""
    if not ray.is_initialized():
        ray.init(address="auto")
    handle = _find(name)
    if handle is None:
        there = sorted(name for name in _names() if "/" not in name)
        raise SettingError(f"there is no fleet {name!r} on this Ray cluster; there are: {', '.join(there) or 'none'}")
    return handle


def _checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return keywords of `serve_gym`; raise SettingError for unknown ones and for those that the fleet sets itself."""
    known = inspect.signature(provided("serve_gym")).parameters
    for name in options:
        if name in _FLEETS_OWN:
            raise SettingError(
                f"{name} cannot be given for a fleet: its servers find hosts, ports and names themselves"
            )
        if name not in known or name == "env":
            raise SettingError(f"launch has no keyword {name!r}; further keywords are those of serve_gym")
    tls = options.get("tls")
    if tls is None:
        return options
    tls = checked_tls(tls)
    if tls.client_ca is not None:
        raise SettingError(
            "tls=TLS(client_ca=…) cannot be given for a fleet: its supervisor has no certificate to show"
        )
    return {**options, "tls": tls.read()}


def _token(options: dict[str, Any]) -> str | None:
    """Remove the clients' token from the keywords of `serve_gym` and return it; generate one if there is none."""
    token, auth = options.pop("token", None), options.get("auth") or Auth()
    if token is None:
        return None if auth.insecure else secrets.token_urlsafe(32)
    return (token if isinstance(token, Token) else Token(token)).reveal()


def _pieces(env: Any, options: dict[str, Any]) -> list[bytes]:
    """Pickle what a server needs, in pieces that Ray's control store keeps, so that servers outlive this program."""
    try:
        data: bytes = ray.cloudpickle.dumps((env, options, registered_specs(env)))
    except Exception as error:
        raise SettingError(
            f"the environment {env!r:.80} cannot be sent to Ray's processes: {error!r}; serve it by its id, or by a "
            "callable that makes it there"
        ) from error
    if len(data) > _MOST_BYTES:
        raise SettingError(
            f"expected an environment of at most {_MOST_BYTES} bytes as it is pickled, got {len(data)}; let the "
            "callable read its data from a file or a Ray object"
        )
    return [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)]
