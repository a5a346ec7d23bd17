"""The public dm-env-rpc client, driving as many connections as a vector environment would."""

from __future__ import annotations

import time
from types import TracebackType

import grpc
from dm_env_rpc.v1 import connection, dm_env_rpc_pb2, message_utils, spec_manager

from bridge.core.transport.address import parse_address

__all__ = ["PublicClients"]


class PublicClients:
    """Connections, each in a world of its own, that are stepped with an action 0 or 1 in turns.

    Both loops ask for observation and reward, and unpack them.
    """

    def __init__(self, url: str, count: int) -> None:
        self._channel = grpc.insecure_channel(parse_address(url).target)
        self._connections = [connection.Connection(self._channel) for _ in range(count)]
        self._actions: list[spec_manager.SpecManager] = []
        self._observations: list[spec_manager.SpecManager] = []
        for link in self._connections:
            name = link.send(dm_env_rpc_pb2.CreateWorldRequest()).world_name
            specs = link.send(dm_env_rpc_pb2.JoinWorldRequest(world_name=name)).specs
            self._actions.append(spec_manager.SpecManager(specs.actions))
            self._observations.append(spec_manager.SpecManager(specs.observations))
        self._wanted = [self._observations[0].name_to_uid(name) for name in ("observation", "reward")]

    def _request(self, slot: int, action: int) -> dm_env_rpc_pb2.StepRequest:
        return dm_env_rpc_pb2.StepRequest(
            actions=self._actions[slot].pack({"action": action}), requested_observations=self._wanted
        )

    def stepping_blocking(self, seconds: float) -> float:
        """Step by the client's ordinary `send`, which waits for each answer; return env steps per second."""
        count = 0
        start = time.perf_counter()
        end = start + seconds
        while (now := time.perf_counter()) < end:
            for slot, link in enumerate(self._connections):
                response = link.send(self._request(slot, count % 2))
                self._observations[slot].unpack(response.observations)
            count += 1
        return count * len(self._connections) / (now - start)

    def stepping_ahead(self, seconds: float) -> float:
        """Send to all connections before the first answer is read, by the client's own stream; return steps per s."""
        count = 0
        start = time.perf_counter()
        end = start + seconds
        while (now := time.perf_counter()) < end:
            for slot, link in enumerate(self._connections):
                request, _ = message_utils.pack_environment_request(self._request(slot, count % 2))
                link._stream.write(request)
            for slot, link in enumerate(self._connections):
                response = message_utils.unpack_environment_response(link._stream.read(), "step")
                self._observations[slot].unpack(response.observations)
            count += 1
        return count * len(self._connections) / (now - start)

    def __enter__(self) -> PublicClients:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for link in self._connections:
            # Its `close` ends neither the stream nor its thread.
            link._stream._requests.put(None)
            link.close()
        self._channel.close()
