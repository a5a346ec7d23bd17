"""Servers that dial out: the simulator connects to the trainer, where no port can be opened beside it.

The simulator asks for an upgrade of HTTP/1.1, and shows the trainer's token. After the answer `101` the roles are as
ever: the trainer is the gRPC client and speaks first, and the simulator serves on that socket.

May be imported by the composition root, and `testing`, which checks servers that dial in.
"""

from typing import TYPE_CHECKING

from bridge.core.extras import lazy_names

if TYPE_CHECKING:
    from bridge.dial.listener import DialListener

__all__ = ["DialListener"]

__getattr__, __dir__ = lazy_names(__name__, {"DialListener": "bridge.dial.listener"})
