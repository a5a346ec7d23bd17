"""A remote environment as a `gymnasium.Env`."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import gymnasium
from gymnasium.envs.registration import ENV_ID_RE, EnvSpec

from bridge.core.back_off import until_up
from bridge.core.client.envs.pool_owner import PoolOwner
from bridge.core.client.options import EnvOptions
from bridge.core.client.slots.resets import reset_settings
from bridge.core.client.world.joined_world import JoinedWorld
from bridge.core.client.world.remote import Remote
from bridge.core.client.world.session_states import ClientState, StepAnswered
from bridge.core.client.world.steps import Transition
from bridge.core.client.world.world_request import WorldInfo
from bridge.core.encoding.message_form import MessageForm
from bridge.core.keywords import grouped, shown_number
from bridge.core.logs import warn
from bridge.core.transport.address import secret_url
from bridge.core.transport.credentials import TLS
from bridge.errors import (
    AlreadyPendingError,
    BridgeError,
    Code,
    RefusedError,
    ResetNeededError,
    SettingError,
    shown_url,
)
from bridge.pb import dm_env_rpc_pb2 as pb

if TYPE_CHECKING:
    from bridge.core.client.messages import MessageReply

__all__ = ["RemoteEnv", "RolloutStep", "remote_metadata", "remote_spec"]


class RolloutStep(NamedTuple):
    """One answer in `RemoteEnv.rollout`."""

    action: Any
    """The action that was sent."""
    observation: Any
    """The result of `step`, or of `reset` if `first` is set."""
    reward: Any
    """The reward, of the environment's own type; 0 if `first` is set."""
    terminated: bool
    """True if the episode terminated."""
    truncated: bool
    """True if the episode was truncated."""
    info: dict[str, Any]
    """The environment's info."""
    first: bool
    """True if this Step began an episode, and its action was ignored."""


class RemoteEnv(PoolOwner, gymnasium.Env[Any, Any]):
    """One remote environment, as if it were local.

    With the same seeds and actions it returns bit for bit what the environment returns locally: observations, rewards,
    flags and infos. The caller owns the results: arrays are writable, and are not changed later.

    Every method that sends a request raises RemoteTimeoutError after `timeout` seconds without an answer,
    ConnectionLostError if the connection is lost, and EnvironmentFailedError with the remote traceback if the
    environment raises. `reset` connects again, also after Ctrl-C in a call.

    Examples:
        >>> from bridge import make_remote, serve_gym
        >>> with serve_gym("CartPole-v1") as server:
        ...     env = make_remote(server.url)
        ...     observation, info = env.reset(seed=0)
        ...     env.close()
        >>> observation.shape
        (4,)

    `spec.id` is the environment's id, such as `CartPole-v1`; `gymnasium.make(env.spec)` makes a second environment at
    the same URL, with the keywords in `spec.kwargs`.

    Public attributes and methods of the environment are read, called and set by a dot, as on a local `env.unwrapped`:
    `env.gravity = 2.0`. The attributes of this class (see docs/limits.md) hide the environment's; `call`, `get_attr`
    and `set_attr` reach those too. A name that neither has is an AttributeError; `set_wrapper_attr` makes a new
    attribute.

    Args:
        url: The server's URL. Its path may name the environment, and its query further CreateWorld settings.
        keywords: The keyword arguments of `make_remote`.

    Raises:
        AddressError: The URL cannot be read.
        ConnectError: No server listens there.
        RefusedError: The server does not have this environment, or not with these arguments.
    """

    _remedy = (
        "the remote environment has none of that name, as far as it is known here: get_wrapper_attr and "
        "set_wrapper_attr ask where it runs"
    )
    # For gymnasium.make, which reads the class; an instance has the metadata of its remote environment.
    metadata: dict[str, Any] = {  # noqa: RUF012 - Gymnasium's declaration
        "render_modes": ["rgb_array", "rgb_array_list", "ansi", "ansi_list", "depth_array", "rgbd_tuple"]
    }

    @grouped(EnvOptions, tls=TLS)
    def __init__(self, url: str, **keywords: Any) -> None:
        options = EnvOptions(**keywords)
        if options.agent is not None and not isinstance(options.agent, str):
            raise SettingError(f"expected agent to be the name of one agent, got {options.agent!r:.80}")
        self._own_pool(options.timeout)
        self._wait_for_server = options.wait_for_server
        request = dataclasses.replace(options.request(url, options.agent), names=True)
        self._remote = Remote(request, self._pool.poller)
        self._own_remotes({"": self._remote})
        self._rollout: object | None = None
        self._connect()
        world_info = self._remote.known_info()
        self.observation_space = world_info.observation_space
        self.action_space = world_info.action_space
        if world_info.reward_space is not None:
            self.reward_space = world_info.reward_space
        self.metadata = remote_metadata(world_info, options.render_mode)
        self.render_mode = options.render_mode or world_info.render_mode
        keywords = {"url": secret_url(url), **options.keywords()}
        self.spec = remote_spec("bridge.core.client.envs.env:RemoteEnv", keywords, world_info, self.render_mode)
        self.spec.max_episode_steps = (world_info.spec or {}).get("max_episode_steps")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._remote = self._remotes[""]

    @property
    def url(self) -> str:
        """The URL given to the constructor."""
        return self._remote.url

    @property
    def server_version(self) -> str | None:
        """The version of a Gymnasium Bridge server; None for another dm_env_rpc server (U-12)."""
        return self._remote.known_info().server_version

    @property
    def draining(self) -> bool:
        """True if the server has said that it accepts no more worlds. This one continues until its client leaves."""
        return self._remote.draining

    @property
    def fps(self) -> float | None:
        """Frames a second of a real-time world; None: the world waits for each action."""
        return self._remote.known_info().fps

    def _connect(self) -> None:
        until_up(lambda: self._pool.join(self._remote), self._wait_for_server)
        lanes = self._remote.known_info().lanes
        # Its observations and rewards are batches, which `gymnasium.Env` does not support.
        if lanes is not None:
            self._remote.close(0.5)
            raise SettingError(
                f"{self.url} is a world of {lanes} lanes; use make_vec_remote for it, or ask for ?num_envs=1"
            )

    def _await_step(self, purpose: str) -> Transition:
        message, reader, _ = self._pool.wait(self._remote, StepAnswered, purpose)
        return reader.read(message, self._remote.now())

    def _refuse_step(self) -> NoReturn:
        """Raise the error that says why `step` is not possible."""
        self._require_open()
        self._refuse_rollout()
        raise ResetNeededError(f"expected reset() before step(): {self._remote.why_reset_is_needed()}")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode.

        Args:
            seed: For the remote environment's random generator: a non-negative integer.
            options: For the remote environment's reset; values that the values codec can encode.

        Returns:
            The first observation and the info.
        """
        with self._conflicts:
            self._require_open()
            # Before anything else, so that a seed or an option that cannot be sent leaves the episode as it is.
            settings = reset_settings(seed, self._remote.options(options))
            super().reset(seed=seed)
            # Not connected after a loss, in a copy, and in a forked process.
            if not self._remote.connected:
                self._connect()
            self._rollout = None
            self._remote.begin(settings)
            observation, _, _, _, info = self._await_step("to reset")
            return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Apply an action.

        Args:
            action: An element of `action_space`; floats are rounded to the space's dtype.

        Returns:
            Observation, reward (of the environment's own type; in real time a float), terminated, truncated and info.

        Raises:
            InvalidActionError: The action is not in the action space; nothing was sent.
            ResetNeededError: No episode is running.
        """
        # The same as `with self._conflicts`, with two calls less in each step. The pool's turn is not taken here: the
        # keepalive thread works on this pool only with Steps in flight, for which `_step_in_flight` takes it.
        try:
            del self._conflicts.free[0]
        except IndexError:
            self._conflicts.refuse()
        try:
            remote = self._remote
            session = remote.session  # the same as `running_world`, with a call less in each step
            world = session.world
            # One condition for all unusual cases: `_refuse_step` finds out which one it is.
            if self._closed or self._rollout is not None or world is None or session.state is not ClientState.RUNNING:
                self._refuse_step()
            if world.answers is not None:
                return self._step_in_flight(world, action)
            remote.send_step(world.writer.write_action(action))
            message, reader, _ = self._pool.wait(remote, StepAnswered, "to a step")
            return reader.read(message, remote.now())
        except BaseException as error:
            if not isinstance(error, BridgeError):
                with self._pool.turn:
                    self._interrupted()
            raise
        finally:
            self._conflicts.free.append(True)

    def _step_in_flight(self, world: JoinedWorld, action: Any) -> Transition:
        """Apply an action, and return the newest results of the Steps in flight."""
        with self._pool.turn:
            self._remote.send_step(world.writer.write_action(action))
            return self._await_step("to a step")

    def rollout(self, actions: Iterable[Any], *, window: int = 32) -> Iterator[RolloutStep]:
        """Send Steps ahead of their answers, and yield the answers in order, across the ends of episodes (D-25).

        The Step after an episode's end begins the next episode, and its action is ignored; `first` is then set. An
        action that is sent ahead of an answer cannot depend on it, so this method is for known actions, such as random
        or recorded ones. If a rollout is not exhausted, the environment needs a `reset`.

        Args:
            actions: Elements of `action_space`; one is taken whenever the window has room.
            window: The most Steps in flight.

        Raises:
            SettingError: The window is no positive integer.
            InvalidActionError: An action is not in the action space; the Steps before it were sent.
            AlreadyPendingError: Another rollout is running, or `reset` ended this one.
        """
        if not isinstance(window, int) or isinstance(window, bool) or window < 1:
            raise SettingError(f"expected window to be a positive integer, got {shown_number(window)}")
        with self._conflicts:
            self._asked()
        # A generator's body begins with the first `next`. These errors are raised earlier, in the caller's line.
        return self._roll(iter(actions), window)

    def _roll(self, actions: Iterator[Any], window: int) -> Iterator[RolloutStep]:
        sent: deque[Any] = deque()
        with self._conflicts:
            self._asked()
            # A later `reset` or rollout stores another value there, by which this generator sees that it is over.
            token = self._rollout = object()
        try:
            while True:
                for action in itertools.islice(actions, window - len(sent)):
                    with self._conflicts:
                        self._require_rollout(token)
                        self._remote.step(action)
                    sent.append(action)
                if not sent:
                    return
                with self._conflicts:
                    self._require_rollout(token)
                    # Before the answer is read: its Step begins an episode if none runs (D-9).
                    first = self._remote.running_world is None
                    transition = self._await_step("to a step")
                yield RolloutStep(sent.popleft(), *transition, first)
        finally:
            if self._rollout is token:
                self._rollout = None
                # Steps are in flight whose answers nobody reads, so the next episode must be requested.
                if sent:
                    self._remote.abandon_episode()

    def _require_rollout(self, token: object) -> None:
        if self._rollout is not token:
            raise AlreadyPendingError(
                "this rollout was ended, by reset() or another rollout; begin a new one", "rollout"
            )
        self._require_open()
        self._require_connection(self._remote)

    def _refuse_rollout(self) -> None:
        if self._rollout is not None:
            raise AlreadyPendingError(
                "a rollout is under way, whose answers come first; exhaust it, or end it by its close() or reset()",
                "rollout",
            )

    def _asked(self) -> Remote:
        self._require_open()
        self._refuse_rollout()
        if not self._remote.was_opened:  # in a copy, or in a forked process
            self._connect()
        return self._require_connection(self._remote)

    def send_message(self, form: MessageForm, request: bytes) -> MessageReply:
        """Send a message of a feature, or of another package. The server must accept it (docs/plugins.md).

        Args:
            form: The form of the message.
            request: The bytes of the request.

        Returns:
            The answer; and, if the environment was put into another situation, its observation and info: the episode
            continues from there, and `step` is possible.

        Raises:
            RefusedError: UNIMPLEMENTED: the server does not accept the message; PERMISSION_DENIED: this client watches,
                or shares the world; or an error of the message itself. The episode continues.
        """
        from bridge.core.client.messages import (
            MessageAnswer,
            MessageReply,
            MessageTarget,
            message_request,
            read_message,
        )

        target = MessageTarget(self.url, (0,), (0,))
        with self._conflicts:
            remote = self._asked()
            sent = message_request(form, request, target, remote.wanted)
            reply = self._reply(remote, sent, f"to a message {form.name}")
            data, step = read_message(form, reply, remote.url)
            answers = [MessageAnswer(target, data, step is not None)]
            if step is None:
                return MessageReply(answers)
            if step.state == pb.RUNNING:
                message, reader, _ = remote.placed(step)
                observation, _, _, _, info = reader.read(message, remote.now())
            else:  # one of several agents, each of which begins a sequence there by its next Step
                remote.begin(reset=False)
                observation, _, _, _, info = self._await_step(f"after a message {form.name}")
            return MessageReply(answers, (observation, info))

    def get_wrapper_attr(self, name: str) -> Any:
        """Return an attribute of this object or, if it has none of that name, of the remote environment.

        Args:
            name: The name, looked up through the environment's wrappers. A remote method is returned as a function that
                calls it.

        Raises:
            MissingAttributeError: Neither has it, or the server does not tell: an AttributeError, and a RefusedError.
        """
        # An attribute of this object hides the remote's, as in a wrapper. `hasattr` would run the properties of this
        # object.
        return getattr(self, name) if self._has_own(name) else self._look(name)

    def has_wrapper_attr(self, name: str) -> bool:
        """True if this object or the remote environment has an attribute. Asks the server only for unknown names."""
        if self._has_own(name) or name in (self._attribute_names() or ()):
            return True
        try:
            self.get_wrapper_attr(name)
        except AttributeError:
            return False
        except RefusedError as error:
            if error.code != Code.INVALID_ARGUMENT:  # the attribute exists, but its value cannot be sent
                raise
        return True

    def _has_own(self, name: str) -> bool:
        return name in self.__dict__ or hasattr(type(self), name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set an attribute of this object if it has one of that name, else of the remote environment.

        Args:
            name: The name, looked up through the environment's wrappers.
            value: A value that the values codec can encode.
            force: True: also create a new attribute.

        Returns:
            True if the attribute was set.
        """
        if self._has_own(name):
            setattr(self, name, value)
            return True
        if not force and not self.has_wrapper_attr(name):
            return False
        self.set_attr(name, value)
        return True

    def __repr__(self) -> str:
        return f"<RemoteEnv {self.url}>"

    __str__ = __repr__


def remote_metadata(world_info: WorldInfo, render_mode: str | None = None) -> dict[str, Any]:
    """Return a remote environment's metadata, without the render mode that opens a window on its machine.

    Warn if `render_mode` is not one of the environment's modes, as `gymnasium.make` does.
    """
    metadata = dict(world_info.metadata)
    modes = [mode for mode in metadata.get("render_modes", []) if mode != "human"]
    if render_mode == "human":
        text = "render_mode='human' opens a window where the environment runs, not here; for frames here"
        warn(f"{text} use one of {modes}, and render()", UserWarning)
    # Servers of other packages name no modes.
    elif render_mode is not None and render_mode not in modes and world_info.server_version is not None:
        text = f"the remote environment is made with render_mode={render_mode!r}, which it does not name: expected"
        warn(f"{text} one of {modes}", UserWarning)
    return {**metadata, "render_modes": modes}


class _RemoteSpec(EnvSpec):
    """The spec of a remote environment. Its JSON, which is stored in data sets, has no token and no certificates."""

    def to_json(self) -> str:
        """Return the spec as JSON. To make an environment from it, give the token again, or set `BRIDGE_TOKEN`."""
        kept = {name: value for name, value in self.kwargs.items() if name not in ("token", "tls")}
        for name in kept.keys() & {"url", "urls"}:
            kept[name] = shown_url(kept[name]) if isinstance(kept[name], str) else [*map(shown_url, kept[name])]
        return EnvSpec.to_json(dataclasses.replace(self, kwargs=kept))


def remote_spec(
    entry_point: str | None, kwargs: dict[str, Any], world_info: WorldInfo, render_mode: str | None
) -> EnvSpec:
    """Return a spec with the id of the remote environment, which makes a second environment of the same kind.

    An environment without an id, such as one made by a callable, gets the id `bridge/Remote-v0`.
    """
    registered = world_info.spec or {}
    if render_mode:
        kwargs = {**kwargs, "render_mode": render_mode}
    env_id = registered.get("id")
    return _RemoteSpec(
        # The id comes from the server, and EnvSpec raises if it does not have Gymnasium's form.
        id=env_id if isinstance(env_id, str) and ENV_ID_RE.fullmatch(env_id) else "bridge/Remote-v0",
        entry_point=entry_point,
        reward_threshold=registered.get("reward_threshold"),
        nondeterministic=bool(registered.get("nondeterministic", False)),
        kwargs=kwargs,
    )
