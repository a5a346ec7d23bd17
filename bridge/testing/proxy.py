"""A bad network for real sockets: a TCP proxy on loopback that delays, throttles, stalls, half-closes and cuts.

`Link` is for protocols without I/O; this is for complete clients and servers in their own threads or processes.

Examples:
    >>> from bridge import make_remote, serve_gym
    >>> from bridge.testing import Proxy
    >>> with serve_gym("CartPole-v1") as server, Proxy(server.port) as proxy:
    ...     proxy.delay, proxy.rate = 0.001, 1e6
    ...     env = make_remote(f"grpc://127.0.0.1:{proxy.port}")
    ...     observation, info = env.reset(seed=0)
    ...     env.close()
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import socket
import threading
from collections.abc import Coroutine, Iterable
from types import TracebackType
from typing import Any

from bridge.errors import SettingError

__all__ = ["Proxy"]

_CHUNK = 16384
_SLICE = 0.02  # seconds of data that a throttled connection sends at once


class Proxy:
    """A proxy that listens on a free port of loopback and forwards each connection to another port, until `close`.

    The faults can be changed at any time, from any thread, and apply to both directions of all connections. Used as a
    context manager, it is closed at the end.

    Args:
        port: The port to which connections are forwarded.
        host: The host of that port.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = (host, port)
        self._delay = 0.0
        self._rate: float | None = None
        self._pairs: dict[tuple[socket.socket, socket.socket], asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        """The port on which it listens."""
        self.passed = 0
        """The number of bytes forwarded, in both directions together."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="bridge-proxy", daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._pairs)

    @property
    def delay(self) -> float:
        """Seconds of delay in each direction."""
        return self._delay

    @delay.setter
    def delay(self, seconds: float) -> None:
        if not (seconds >= 0 and math.isfinite(seconds)):
            raise SettingError(f"expected delay in finite seconds, 0 or more, got {seconds}")
        self._delay = seconds

    @property
    def rate(self) -> float | None:
        """Bytes per second, for each direction of each connection; None: no limit."""
        return self._rate

    @rate.setter
    def rate(self, rate: float | None) -> None:
        if rate is not None and not (rate > 0 and math.isfinite(rate)):
            raise SettingError(f"expected rate in bytes per second, more than 0, or None, got {rate}")
        self._rate = rate

    def stall(self) -> None:
        """Stop forwarding without closing: both ends see half-open connections. `resume` ends this."""
        self._do(self._set_flowing(False))

    def resume(self) -> None:
        """Forward what arrived during a stall, and continue."""
        self._do(self._set_flowing(True))

    def half_close(self, end: str) -> None:
        """Signal the end of the stream to one end of every connection; data from that end is still forwarded.

        Args:
            end: `client` or `server`.
        """
        if end not in ("client", "server"):
            raise SettingError(f"expected end to be 'client' or 'server', got {end!r}")
        self._do(self._half_close(end == "server"))

    def cut(self) -> None:
        """Close every connection; new ones can be opened."""
        self._do(self._cut())

    def close(self) -> None:
        """Close every connection, and stop listening. May be called twice."""
        if not self._thread.is_alive():
            return
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._start(self._accept())
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self) -> None:
        while True:
            client, _ = await self._loop.sock_accept(self._listener)
            pair = (client, socket.socket())
            self._pairs[pair] = task = self._start(self._connect(pair))
            task.add_done_callback(functools.partial(self._over, pair))  # also called if the task never began

    def _over(self, pair: tuple[socket.socket, socket.socket], task: asyncio.Task[None]) -> None:
        del self._pairs[pair]
        for sock in pair:
            sock.close()

    async def _connect(self, pair: tuple[socket.socket, socket.socket]) -> None:
        client, server = pair
        ways: list[asyncio.Task[None]] = []
        try:
            for sock in pair:
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.sock_connect(server, self._target)
            ways = [self._start(self._pass(*way)) for way in ((client, server), (server, client))]
            await asyncio.gather(*ways)  # one direction may end long before the other
        except OSError:
            pass  # the target refuses connections, or an end disconnected: the other end is disconnected, too
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        """Forward the data of one end, and its end of stream."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=16)
        deliverer = self._start(self._deliver(under_way, sink))
        try:
            data = b"some"
            while data:
                data = await self._loop.sock_recv(source, _CHUNK)
                await under_way.put((self._loop.time() + self._delay, data))
            await deliverer
        finally:
            deliverer.cancel()

    async def _deliver(self, under_way: asyncio.Queue[tuple[float, bytes]], sink: socket.socket) -> None:
        open_ = True
        while open_:
            due, data = await under_way.get()
            await asyncio.sleep(due - self._loop.time())
            open_ = bool(data)
            try:
                while data:
                    await self._flowing.wait()
                    rate = self._rate
                    size = len(data) if rate is None else max(1, int(rate * _SLICE))
                    piece, data = data[:size], data[size:]
                    if rate is not None:
                        await asyncio.sleep(len(piece) / rate)
                    await self._loop.sock_sendall(sink, piece)
                    self.passed += len(piece)
                if not open_:
                    await self._flowing.wait()
                    sink.shutdown(socket.SHUT_WR)
            except OSError:
                data = b""  # the receiver has disconnected, or was told that the stream has ended: drop the rest

    async def _set_flowing(self, flowing: bool) -> None:
        if flowing:
            self._flowing.set()
        else:
            self._flowing.clear()

    async def _half_close(self, at_server: bool) -> None:
        for pair in self._pairs:
            with contextlib.suppress(OSError):
                pair[at_server].shutdown(socket.SHUT_WR)

    async def _cut(self) -> None:
        await _cancel(self._pairs.values())

    async def _end(self) -> None:
        await _cancel(self._tasks)
        self._listener.close()


async def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
