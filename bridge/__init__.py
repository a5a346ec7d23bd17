"""Reinforcement-learning environments in one place, training loops in another: Gymnasium over dm_env_rpc."""

from typing import TYPE_CHECKING

from bridge.core.extras import has_feature, is_installed, lazy_names, provide
from bridge.registration import register_remote

if TYPE_CHECKING:
    from bridge.core.adapters.timed import TimeAction
    from bridge.core.client.endpoints import Directory, DnsDirectory, Endpoint, FileDirectory, Scheme
    from bridge.core.client.envs.env import RemoteEnv
    from bridge.core.client.envs.parallel_env import RemoteParallelEnv
    from bridge.core.client.envs.vector_env import RemoteVectorEnv
    from bridge.core.client.messages import MessageReply, MessageTarget
    from bridge.core.client.slots.slot import SlotState
    from bridge.core.encoding.message_form import MessageForm, Origin
    from bridge.core.encoding.properties import Property
    from bridge.core.encoding.space_json import register_space
    from bridge.core.server.auth import Auth, Gate
    from bridge.core.server.calls import ServedSession
    from bridge.core.server.http11 import HttpAnswer, HttpRequest
    from bridge.core.server.port import (
        Admitted,
        ConnectionHandler,
        Conversation,
        Port,
        PortProtocol,
        PortSession,
        Route,
        SessionRoute,
    )
    from bridge.core.transport.credentials import TLS, ClientCredentials
    from bridge.core.worlds.environment import Transition
    from bridge.core.worlds.messages import AskedMessage, MessageHandler, MessagePart, SessionMessage, Stage
    from bridge.core.worlds.observers import Background, Episode, Episodes, Listener, Observer
    from bridge.core.worlds.realtime_options import RealTime
    from bridge.core.worlds.scheduling import Scheduler
    from bridge.core.worlds.turn_pacer import Decision, Turn, TurnPacer
    from bridge.facade.blocking import serve
    from bridge.facade.make import make_remote, make_vec_remote
    from bridge.facade.make_parallel import make_parallel_remote
    from bridge.facade.serve import serve_gym
    from bridge.facade.serve_game import serve_game
    from bridge.facade.serve_parallel import serve_parallel
    from bridge.facade.server import Limits, Server
    from bridge.game.game import Game
    from bridge.recording.record import Recording
    from bridge.recording.recorder import Recorder
    from bridge.states.bounds import States
    from bridge.states.saved import SavedState
    from bridge.version import __version__
    from bridge.web.site import Web

__all__ = [
    "TLS",
    "Admitted",
    "AskedMessage",
    "Auth",
    "Background",
    "ClientCredentials",
    "ConnectionHandler",
    "Conversation",
    "Decision",
    "Directory",
    "DnsDirectory",
    "Endpoint",
    "Episode",
    "Episodes",
    "FileDirectory",
    "Game",
    "Gate",
    "HttpAnswer",
    "HttpRequest",
    "Limits",
    "Listener",
    "MessageForm",
    "MessageHandler",
    "MessagePart",
    "MessageReply",
    "MessageTarget",
    "Observer",
    "Origin",
    "Port",
    "PortProtocol",
    "PortSession",
    "Property",
    "RealTime",
    "Recorder",
    "Recording",
    "RemoteEnv",
    "RemoteParallelEnv",
    "RemoteVectorEnv",
    "Route",
    "SavedState",
    "Scheduler",
    "Scheme",
    "ServedSession",
    "Server",
    "SessionMessage",
    "SessionRoute",
    "SlotState",
    "Stage",
    "States",
    "TimeAction",
    "Transition",
    "Turn",
    "TurnPacer",
    "Web",
    "__version__",
    "make_parallel_remote",
    "make_remote",
    "make_vec_remote",
    "register_space",
    "serve",
    "serve_game",
    "serve_gym",
    "serve_parallel",
]

# Names that need an extra. Without it they are not in `from bridge import *` and `dir(bridge)`, because both (and
# `inspect.getmembers(bridge)`) would raise ImportError. Accessing such a name raises an error that says what to
# install.
_NEED = {
    "Recorder": "pyarrow",
    "Recording": "pyarrow",
    "RemoteParallelEnv": "pettingzoo",
    "make_parallel_remote": "pettingzoo",
    "recording": "pyarrow",
}
_absent = {name for name, package in _NEED.items() if not is_installed(package)}

register_remote()
provide(
    serve_gym="bridge.facade.serve:serve_gym",
    server="bridge.facade.server:Server",
    groups="bridge.facade.options:GROUPS",
    make_vec_remote="bridge.facade.make:make_vec_remote",
    other_schemes="bridge.facade.make:other_schemes",
    gateway_schemes="bridge.facade.gateway_schemes:GATEWAY_SCHEMES",
    environment_properties="bridge.facade.environment_properties:ENVIRONMENT_PROPERTIES",
    as_policy="bridge.facade.policies:as_policy",
    client_methods="bridge.facade.client_methods:CLIENT_METHODS",
    reseed="bridge.states.reseed:reseed",
)

# Each name is imported at its first use: the command line starts fast, and some names need an extra.
_PLACES = {
    "AskedMessage": "bridge.core.worlds.messages",
    "Admitted": "bridge.core.server.port",
    "Auth": "bridge.core.server.auth",
    "Background": "bridge.core.worlds.observers",
    "ClientCredentials": "bridge.core.transport.credentials",
    "ConnectionHandler": "bridge.core.server.port",
    "Conversation": "bridge.core.server.port",
    "Decision": "bridge.core.worlds.turn_pacer",
    "Directory": "bridge.core.client.endpoints",
    "DnsDirectory": "bridge.core.client.endpoints",
    "Endpoint": "bridge.core.client.endpoints",
    "Episode": "bridge.core.worlds.observers",
    "Episodes": "bridge.core.worlds.observers",
    "FileDirectory": "bridge.core.client.endpoints",
    "Game": "bridge.game.game",
    "Gate": "bridge.core.server.auth",
    "HttpAnswer": "bridge.core.server.http11",
    "HttpRequest": "bridge.core.server.http11",
    "Limits": "bridge.facade.server",
    "Listener": "bridge.core.worlds.observers",
    "SessionMessage": "bridge.core.worlds.messages",
    "MessageForm": "bridge.core.encoding.message_form",
    "MessageHandler": "bridge.core.worlds.messages",
    "MessagePart": "bridge.core.worlds.messages",
    "MessageReply": "bridge.core.client.messages",
    "MessageTarget": "bridge.core.client.messages",
    "Observer": "bridge.core.worlds.observers",
    "Origin": "bridge.core.encoding.message_form",
    "Port": "bridge.core.server.port",
    "PortProtocol": "bridge.core.server.port",
    "PortSession": "bridge.core.server.port",
    "Property": "bridge.core.encoding.properties",
    "RealTime": "bridge.core.worlds.realtime_options",
    "Transition": "bridge.core.worlds.environment",
    "Turn": "bridge.core.worlds.turn_pacer",
    "TurnPacer": "bridge.core.worlds.turn_pacer",
    "Recorder": "bridge.recording.recorder",
    "Recording": "bridge.recording.record",
    "SavedState": "bridge.states.saved",
    "RemoteEnv": "bridge.core.client.envs.env",
    "RemoteParallelEnv": "bridge.core.client.envs.parallel_env",
    "RemoteVectorEnv": "bridge.core.client.envs.vector_env",
    "Route": "bridge.core.server.port",
    "Scheduler": "bridge.core.worlds.scheduling",
    "Scheme": "bridge.core.client.endpoints",
    "ServedSession": "bridge.core.server.calls",
    "Server": "bridge.facade.server",
    "SessionRoute": "bridge.core.server.port",
    "Stage": "bridge.core.worlds.messages",
    "SlotState": "bridge.core.client.slots.slot",
    "States": "bridge.states.bounds",
    "TLS": "bridge.core.transport.credentials",
    "TimeAction": "bridge.core.adapters.timed",
    "Web": "bridge.web.site",
    "__version__": "bridge.version",
    "make_parallel_remote": "bridge.facade.make_parallel",
    "make_remote": "bridge.facade.make",
    "make_vec_remote": "bridge.facade.make",
    "register_space": "bridge.core.encoding.space_json",
    "serve": "bridge.facade.blocking",
    "serve_game": "bridge.facade.serve_game",
    "serve_gym": "bridge.facade.serve",
    "serve_parallel": "bridge.facade.serve_parallel",
}
_MODULES = {name: f"bridge.{name}" for name in ("errors", "perlert", "testing", "wrappers")}
# `record=` needs the folder without the extra. Code that accesses the module wants to read recordings, and needs it.
_MODULES["recording"] = "bridge.recording.reader"

# The same for names of a feature that this installation lacks.
for _module in {*_MODULES, *(_place.split(".")[1] for _place in _PLACES.values())}:
    if not has_feature(_module):
        _absent |= {_module, *(name for name, place in _PLACES.items() if place.startswith(f"bridge.{_module}."))}
__all__ = [name for name in __all__ if name not in _absent]
__getattr__, __dir__ = lazy_names(__name__, _PLACES, _MODULES, _absent)
