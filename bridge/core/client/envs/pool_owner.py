"""The base class of `RemoteEnv` and `RemoteParallelEnv`: a pool of their own, copies, and requests for attributes."""

from __future__ import annotations

import copy
import functools
import weakref
from typing import Any

from bridge.core.client.attributes import RemoteAttributes, missing_attributes
from bridge.core.client.slots.pool import Pool
from bridge.core.client.turns import ConflictDetector
from bridge.core.client.world.extensions import (
    attribute_write,
    call_request,
    call_results,
    looked_up,
    property_request,
    property_value,
)
from bridge.core.client.world.remote import Remote
from bridge.core.client.world.session_states import Replied
from bridge.core.encoding.names import KnownNames
from bridge.core.ownership import forget_in_child
from bridge.errors import ClosedError, Code, ConnectionLostError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["PoolOwner"]

# Attributes that belong to one process: `__setstate__` makes new ones.
_NOT_COPIED = ("_conflicts", "_pool", "_remote", "_remotes", "_maker")


class PoolOwner(RemoteAttributes):
    """An environment with a pool of its own, which one thread uses at a time.

    In a copy, and in a forked process, the remotes have no connection until the next call that needs one.
    """

    _remotes: dict[str, Remote]
    """The remotes, by the agent's name; a single environment's has an empty name."""
    _copied_names: KnownNames | None = None
    """The names of attributes known when this copy was made; None: this object is no copy."""
    _closed = False

    def _own_pool(self, timeout: float) -> None:
        self._pool = Pool(timeout)
        # Weak, because a reference cycle would keep an unreferenced environment until the next garbage collection.
        interrupted = weakref.WeakMethod(self._interrupted)
        self._conflicts = ConflictDetector("environment", self._pool.turn, interrupted)

    def _own_remotes(self, remotes: dict[str, Remote]) -> None:
        self._remotes = remotes
        # Not before: an environment without remotes, whose construction failed, would raise in a forked process.
        forget_in_child(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy. The copy connects by itself, to a new world if this object created one."""
        # The known facts about the world are copied, so that a copy has its spaces before it connects.
        known = {name: (remote.request, remote.info) for name, remote in self._remotes.items()}
        state = {key: value for key, value in self.__dict__.items() if key not in _NOT_COPIED}
        names = copy.deepcopy(self._attribute_names())
        return {**state, "_copied_names": names, "_parts": (self._pool.timeout, known)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        timeout, known = state["_parts"]
        self.__dict__.update({key: value for key, value in state.items() if key != "_parts"})
        self._own_pool(timeout)
        self._own_remotes(
            {
                name: Remote(request, self._pool.poller, info, together=bool(name))
                for name, (request, info) in known.items()
            }
        )

    def after_fork(self) -> None:
        """Leave the connections to the parent process; the next call that needs one makes it for this process."""
        state = self.__getstate__()
        for remote in self._remotes.values():
            # Before `__setstate__` replaces them: the connections are the parent's, and no byte may be sent over them.
            remote.disown()
        self.__setstate__(state)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this environment was closed; make a new one")

    def _require_connection(self, remote: Remote) -> Remote:
        if not remote.connected:
            raise ConnectionLostError(remote.url, "there is no connection; reset() makes a new one")
        return remote

    def _asked(self) -> Remote:
        """Return the remote that answers requests for attributes; raises if there is none."""
        raise NotImplementedError

    def _reply(self, remote: Remote, request: pb.EnvironmentRequest, purpose: str) -> pb.EnvironmentResponse:
        """Send a request to a remote, and wait for its reply."""
        remote.ask(request)
        return self._pool.wait(remote, Replied, purpose).message

    def _read_property(self, remote: Remote, key: str, purpose: str, *, encoded: bool) -> Any:
        return property_value(self._reply(remote, property_request(key), purpose), remote.url, encoded)

    def render(self) -> Any:
        """Return the current frame in the environment's render mode; None without a render mode."""
        with self._conflicts:
            return self._read_property(self._asked(), "world.frame", "to render", encoded=True)[0]

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a public method of the remote environment, or read a public attribute.

        Args:
            name: The name, looked up through the environment's wrappers.
            args: Values that the values codec can encode.
            kwargs: Values that the values codec can encode.

        Raises:
            MissingAttributeError: The environment has no attribute of that name: an AttributeError, and a RefusedError.
            RefusedError: PERMISSION_DENIED for a private name, for `reset`, `step` and `close`, and if this client only
                watches, or shares the world; UNIMPLEMENTED if the server has no method calls.
            EnvironmentFailedError: The method raised, an AttributeError for example.
        """
        with self._conflicts, missing_attributes():
            remote = self._asked()
            request = call_request(name, args, kwargs, columns=remote.reads_columns)
            reply = self._reply(remote, request, f"to the call of {name}")
            return call_results(reply, remote.url, 1)[0]

    def get_attr(self, name: str) -> Any:
        """Read a public attribute of the remote environment; raises as `call`."""
        return self.call(name)

    def set_attr(self, name: str, value: Any) -> None:
        """Set a public attribute of the remote environment.

        Args:
            name: The name. A new attribute is set on the outermost wrapper.
            value: A value that the values codec can encode.

        Raises:
            MissingAttributeError: It cannot be set, such as a property without a setter: an AttributeError.
            RefusedError: As `call`.
        """
        with self._conflicts, missing_attributes():
            remote = self._asked()
            self._reply(remote, attribute_write(name, [value], columns=remote.reads_columns), f"to setting {name}")
            if (names := self._attribute_names()) is not None:
                names.add_attribute(name)

    def _attribute_names(self) -> KnownNames | None:
        # All remotes of one environment have the same names; it is not known which was told last.
        return next((remote.names for remote in self._remotes.values()), None) or self._copied_names

    def _look(self, name: str) -> Any:
        # Other packages' servers, and servers for viewers, may have the attribute but refuse to return it.
        codes = Code.PERMISSION_DENIED, Code.UNIMPLEMENTED
        with self._conflicts, missing_attributes(*codes):
            remote = self._asked()
            request = call_request(name, (), {}, look=True)
            found, is_method = looked_up(self._reply(remote, request, f"to a look at {name}"), remote.url)
        return functools.partial(self.call, name) if is_method else found

    def _interrupted(self) -> None:
        """Disconnect if an answer is outstanding: it would be taken for the answer to another call."""
        if any(remote.outstanding for remote in self._remotes.values()):
            self._disconnect(0.0)

    def _disconnect(self, timeout: float) -> None:
        self._pool.close(self._remotes.values(), timeout)

    def close(self) -> None:
        """Leave the world, which is destroyed if this object created it, and disconnect. May be called twice."""
        with self._conflicts:
            self._closed = True
            self._disconnect(2.0)

    def __del__(self) -> None:
        # `__init__` may have raised before there were any. No waiting, because the garbage collector runs anywhere.
        remotes = self.__dict__.get("_remotes", {})
        if not remotes or not self._pool.is_frozen():
            for remote in remotes.values():
                remote.close(0.0)
