"""Servers that dial out: the simulator connects to the trainer, for networks where the simulator cannot open a port.

The simulator requests an HTTP/1.1 upgrade and sends the trainer's token. After the response `101` the roles are the
usual ones: the trainer is the gRPC client and speaks first, and the simulator serves on that socket.

May be imported by the composition root, and by `testing`, which checks servers that dial in.
"""

from typing import TYPE_CHECKING

from bridge.core.extras import lazy_names

if TYPE_CHECKING:
    from bridge.dial.listener import DialListener

__all__ = ["DialListener"]

__getattr__, __dir__ = lazy_names(__name__, {"DialListener": "bridge.dial.listener"})
