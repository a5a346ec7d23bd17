"""`serve_parallel`: a PettingZoo environment as a world of several agents."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from bridge.server.auth import Security
from bridge.server.limits import Limits
from bridge.server.server import IDLE_TIMEOUT, RESET_WORLD_TIMEOUT, Server
from bridge.transport.credentials import TokenLike
from bridge.worlds.isolated.world import CALL_TIMEOUT, Isolation
from bridge.worlds.multi_agent.joint_steps import MultiAgentOptions
from bridge.worlds.multi_agent.source import ParallelSource

__all__ = ["serve_parallel"]

_DEFAULTS = Limits()


def serve_parallel(
    env: Any,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    missing_agent: str = "wait",
    agent_timeout: float = 30.0,
    default_action: Callable[[Any, Any, Any], Any] | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    max_connections: int = _DEFAULTS.max_connections,
    max_worlds: int = _DEFAULTS.max_worlds,
    max_message_bytes: int = _DEFAULTS.max_message_bytes,
    idle_timeout: float | None = IDLE_TIMEOUT,
    reset_world_timeout: float = RESET_WORLD_TIMEOUT,
    token: TokenLike | None = None,
    token_file: str | os.PathLike[str] | None = None,
    tls_certificate: str | os.PathLike[str] | bytes | None = None,
    tls_key: str | os.PathLike[str] | bytes | None = None,
    tls_client_ca: str | os.PathLike[str] | bytes | None = None,
    isolation: str | None = None,
    call_timeout: float | None = CALL_TIMEOUT,
    max_world_bytes: int | None = None,
    metrics_port: int | None = None,
    start: bool = True,
) -> Server:
    """Publish a PettingZoo environment as a world of dm_env_rpc in which each connection is an agent.

    A client joins as the agent that its JoinWorld setting `agent` names, or as the first that is free. The environment
    steps once all agents' actions are in.

    Args:
        env: An id of PettingZoo's registry, a callable that returns a ParallelEnv or AECEnv, a PettingZoo module, or
            one environment. PettingZoo converts an AECEnv. An environment object belongs to the server's thread from
            the server's first call on: nothing else may use it then.
        env_kwargs: Keyword arguments for the callable; those that a client sends override them.
        missing_agent: What to do if nobody has joined as an agent, its client left or died, or its Step is late: `wait`
            for it, use a `default` action, or `end` the sequence.
        agent_timeout: Seconds that a Step waits for the other agents.
        default_action: Returns a missing agent's action, given its id, last observation and action space; None: the
            first allowed action, or zeros within the bounds.
        host: The address to listen on. Any other than a loopback address is open to the network, and warns.
        port: The port to listen on; 0: any free port.
        max_connections: The most connections at a time; each agent has one.
        max_worlds: The most worlds at a time.
        max_message_bytes: The largest request or response, in bytes.
        idle_timeout: Seconds after which a world without agents is destroyed; None: never, as for an environment
            object.
        reset_world_timeout: Seconds that ResetWorld waits for the next Steps of the world's other agents.
        token: The secret that each client must send, as for `serve_gym`.
        token_file: A file that contains the token.
        tls_certificate: The server's certificate, PEM; the port then speaks TLS only.
        tls_key: The private key of `tls_certificate`, PEM.
        tls_client_ca: The CA that must have signed each client's certificate, PEM; None: clients need none.
        isolation: `process` runs each world's environment in a process of its own, so that a crash, an endless loop or
            a memory leak ends that world only; it needs a callable. None: all run in the server's process.
        call_timeout: With isolation, the seconds that one call of an environment may take, as for `serve_gym`.
        max_world_bytes: With isolation, the bytes that a world's process may allocate; None: no limit.
        metrics_port: Serve metrics for Prometheus at this port; 0: any free port; None: no metrics.
        start: Serve in a background thread at once. False: listen, and serve when `start()` or `run()` of the server
            is called.

    Returns:
        The server, as `serve_gym` returns it.

    Raises:
        SettingError: The environment cannot be served, a keyword is out of its range, the port is in use.
    """
    source = ParallelSource(
        env,
        MultiAgentOptions(missing_agent, agent_timeout, default_action),
        env_kwargs,
        Isolation.of(isolation, call_timeout, max_world_bytes),
    )
    limits = Limits(max_connections, max_worlds, max_message_bytes=max_message_bytes)
    security = Security.of(
        token=token,
        token_file=token_file,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
    )
    server = Server(
        source,
        host=host,
        port=port,
        limits=limits,
        idle_timeout=None if source.single else idle_timeout,
        security=security,
        metrics_port=metrics_port,
        reset_world_timeout=reset_world_timeout,
    )
    if start:
        server.start()
    return server
