"""The URL scheme `perlert://`: slots in PERLERT lobbies."""

from __future__ import annotations

from bridge.core.client.endpoints import Scheme
from bridge.perlert.client import make_perlert_env
from bridge.perlert.vector import PerlertVectorEnv

__all__ = ["SCHEME"]

SCHEME = Scheme(
    names=("perlert",),
    description="a slot in a PERLERT lobby",
    make_env=make_perlert_env,
    make_vector_env=PerlertVectorEnv,
    keywords={
        "tag": "what to be called in the lobby",
        "key": "the pre-shared key",
        "use_profile": "whether to offer the server sequence numbers, acknowledgements and running returns",
        "start_timeout": "seconds that `reset` waits for the simulation's start",
        "config": "times of the client, a `bridge.perlert.PlayerConfig`",
        "action_space": "the action space, if the server does not send it",
        "observation_space": "the observation space, if the server does not send it",
    },
    # Slots never wait for each other in PERLERT, so no blocking vector is offered.
    blocking=False,
)
"""`perlert://HOST:PORT/NAME:NUMBER`."""
