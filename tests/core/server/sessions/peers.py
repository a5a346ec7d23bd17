"""A session without a network, and a client that speaks bytes to it."""

import gymnasium
import numpy as np
from gymnasium import spaces

from bridge import MessageForm, MessagePart, SessionMessage
from bridge.core.encoding.names import PROPERTY_REQUEST_URL
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.core.server.session_states import SessionState
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.pb import properties_pb2
from bridge.testing import CountingEnv
from tests.support import direct_registry, direct_session, gym_source


class Server:
    """The worlds of a server without a network; `envs` are those that were made, in order."""

    def __init__(self, make=CountingEnv, observers=(), messages=(), **kwargs):
        self.envs = []

        def factory(**settings):
            env = make(**settings)
            self.envs.append(env)
            return env

        self.registry = direct_registry(gym_source(factory, **kwargs), observers=observers, messages=messages)

    def connect(self):
        return Peer(direct_session(self.registry))


class Peer:
    """A client that speaks bytes to a session, and reads by the names of the specs."""

    def __init__(self, session):
        self.session = session
        self.actions, self.observations = {}, {}

    @property
    def state(self):
        return self.session.state

    def ask(self, **fields):
        request = pb.EnvironmentRequest(**fields)
        response = pb.EnvironmentResponse.FromString(self.session.handle(request.SerializeToString()))
        kind = response.WhichOneof("payload")
        assert kind in ("error", request.WhichOneof("payload"))  # D-1: of its kind, or an error
        if kind != "error":
            for specs in (response.join_world.specs, response.reset.specs):
                if specs.observations:
                    self.actions = {spec.name: uid for uid, spec in specs.actions.items()}
                    self.observations = {spec.name: uid for uid, spec in specs.observations.items()}
        return response

    def refused(self, code, *parts, **fields):
        """Send a request that must fail with this code, these words, and no change of state (D-2)."""
        before = self.state
        response = self.ask(**fields)
        assert response.WhichOneof("payload") == "error", response
        assert response.error.code == code, response.error
        for part in parts:
            assert part in response.error.message
        assert self.state is before
        return response.error.message

    def join(self, name="", **settings):
        settings = {"gymnasium": pack_tensor(True), **settings}
        response = self.ask(join_world={"world_name": name, "settings": settings})
        assert response.WhichOneof("payload") == "join_world", response
        return response.join_world.specs

    def step(self, action=0, wanted=("observation",), **more):
        """A Step with the action `action`; None sends none."""
        actions = {} if action is None else {self.actions["action"]: pack_tensor(action)}
        step = {"actions": actions, "requested_observations": [self.observations.get(name, 999) for name in wanted]}
        return self.ask(step={**step, **more})

    def play(self, action=0, wanted=("observation", "reward", "discount")):
        """A Step that must succeed: the state's name and the observations asked for."""
        response = self.step(action, wanted)
        assert response.WhichOneof("payload") == "step", response.error.message
        uids = [self.observations[name] for name in wanted]
        got = [unpack_tensor(response.step.observations[uid]).tolist() for uid in uids]
        return (pb.EnvironmentStateType.Name(response.step.state), *got)

    def property(self, **fields):
        data = properties_pb2.PropertyRequest(**fields).SerializeToString()
        return self.ask(extension={"type_url": PROPERTY_REQUEST_URL, "value": data})


# The table


class Moves(MessagePart):
    """Says that the environment is in another situation."""

    def answer(self, request):
        # Also where no episode runs: what may be gone on from is for the part to say.
        self.stage.place(0, self.stage.whole.observation_space.sample(), {})
        return b""


MOVES = SessionMessage(MessageForm("moves", "tests.Moves", "tests.Moved", places=True), part=Moves)


ENDING = {SessionState.TERMINATED: False, SessionState.INTERRUPTED: True}


def brought_to(state, length=1):
    """A connection in a state, by requests alone; beside it a world `other` that nobody is in."""
    server = Server(lambda: CountingEnv(length, truncates=ENDING.get(state, False)), messages=[MOVES])
    peer = server.connect()
    other = server.connect().ask(create_world={}).create_world.world_name
    if state is SessionState.UNJOINED:
        return server, peer, other
    if state is SessionState.CLOSED:
        peer.session.close()
        return server, peer, other
    peer.join()
    if state is not SessionState.JOINED:
        peer.step()
    if state in ENDING:
        peer.step()
    assert peer.state is state
    return server, peer, other


class WildEnv(gymnasium.Env):
    """Its step returns what the test says."""

    observation_space = spaces.Dict(
        a=spaces.Box(0, 1, (2,)),
        g=spaces.Graph(spaces.Discrete(2), None),
        t=spaces.Text(3),
        s=spaces.Sequence(spaces.Text(2)),
    )
    action_space = spaces.Discrete(2)
    result = None

    def good(self):
        return {**self.observation_space.sample()}

    def reset(self, *, seed=None, options=None):
        return self.good(), {}

    def step(self, action):
        return self.result


class Looked:
    """A number that is known only once somebody asks for it."""

    def __init__(self, look):
        self.look = look

    def __array__(self, dtype=None, copy=None):
        return np.array(self.look(), dtype)


class Told(gymnasium.Env):
    """Gives observations and infos as they are."""

    action_space = spaces.Discrete(2)

    def __init__(self, observation_space, observe, info=None):
        self.observation_space, self.observe, self.info = observation_space, observe, info or {}

    def reset(self, *, seed=None, options=None):
        return self.observe(), self.info

    def step(self, action):
        return self.observe(), 1.0, False, False, self.info
