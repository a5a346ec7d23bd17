"""Many remote environments as one `gymnasium.vector.VectorEnv`, which never waits for a slot that is resetting."""

from __future__ import annotations

import contextlib
import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from bridge.core.client.attributes import OwnAttributes
from bridge.core.client.endpoints import Directory, as_directory
from bridge.core.client.envs.env import remote_metadata, remote_spec
from bridge.core.client.options import VectorOptions, checked_urls
from bridge.core.client.slots.joining import join
from bridge.core.client.slots.results import Results
from bridge.core.client.slots.slot import RemoteReport
from bridge.core.client.slots.slots import Slots
from bridge.core.client.slots.stepper import OnLost, Received
from bridge.core.encoding.message_form import MessageForm, Origin
from bridge.core.encoding.seeds import generator_of
from bridge.core.encoding.tensors import Array
from bridge.core.keywords import grouped
from bridge.core.ownership import end_apart
from bridge.core.transport.address import secret_url
from bridge.core.transport.credentials import TLS
from bridge.errors import Code, RefusedError, SettingError

if TYPE_CHECKING:
    from bridge.core.client.messages import MessageAnswer, MessageReply, MessageWriter, PlaceListener

__all__ = ["VECTOR_ENTRY_POINT", "OwningVectorEnv", "RemoteVectorEnv"]

VECTOR_ENTRY_POINT = "bridge.wrappers.blocking_reset:make_blocking"
"""The entry point that `gymnasium.make_vec(envs.spec)` calls."""


class RemoteVectorEnv(OwnAttributes, VectorEnv[Any, Any, Array]):
    """A vector of remote environments, with the semantics of OpenAI Universe under Gymnasium's interface.

    Observations are a tuple with one entry per slot: an observation of `single_observation_space`, or None for a slot
    that is connecting, resetting or lost. `reset` returns at once. A slot whose episode ended begins its next episode
    automatically in the following `step`. Until its first observation arrives, its entry is None, with reward 0 and
    both flags False, and its action is not applied. Running slots do not wait for it. `bridge.wrappers.BlockingReset`
    waits for all slots and returns batched arrays. A world of lanes whose simulator resets them itself stays in mode
    SAME_STEP: an ended lane's observation is already the new episode's, and `infos["final_obs"]` has the last one.

    A slot whose remote environment is lost ends its episode with `truncated=True` once, and `infos["error"]` says why.
    It connects again with growing pauses, while the other slots continue.

    Examples:
        >>> from bridge import make_vec_remote, serve_gym
        >>> with serve_gym("CartPole-v1") as server:
        ...     envs = make_vec_remote(server.url, num_envs=3, blocking=True)
        ...     observations, infos = envs.reset(seed=0)
        ...     envs.close()
        >>> observations.shape
        (3, 4)

    Infos are Gymnasium's dict of arrays with `_key` masks, and in addition `n`, a tuple of each slot's own info (U-7),
    and `slot_state`, an int64 array of `SlotState`.

    Args:
        urls: One server's URL per world; or one URL, at which `num_envs` worlds are created; or a directory, as for
            `make_vec_remote`. A world of N lanes fills N slots.
        waits_for_all: True if a wrapper waits for all slots in each step: then `lanes=None` may mean lanes.
        keywords: The keyword arguments of `make_vec_remote`.

    Raises:
        AddressError: A URL cannot be read.
        ConnectError: No server listens at one of the URLs.
        RefusedError: A server does not have this environment, or not with these arguments.
        SettingError: The worlds differ in their spaces, or do not add up to `num_envs`.
    """

    @grouped(VectorOptions, tls=TLS)
    def __init__(self, urls: str | Sequence[str] | Directory, *, waits_for_all: bool = False, **keywords: Any) -> None:
        options = VectorOptions(**keywords)
        self.closed = False
        # The URLs are stored in `spec.kwargs`, which is printed: tokens must not be in it.
        if isinstance(urls, str):
            urls = secret_url(urls)
        elif as_directory(urls) is None:
            urls = checked_urls(urls)
        self._slots = Slots(join(urls, options, waits_for_all=waits_for_all))
        self._place_listeners: list[weakref.ref[PlaceListener]] = []
        world_info = self._slots.world_info()
        self.num_envs = self._slots.count
        self.single_observation_space: Space[Any] = world_info.observation_space
        self.single_action_space: Space[Any] = world_info.action_space
        self.observation_space = batch_space(world_info.observation_space, self.num_envs)
        self.action_space = batch_space(world_info.action_space, self.num_envs)
        mode = AutoresetMode.NEXT_STEP
        if world_info.lanes is not None and world_info.metadata.get("autoreset_mode") == AutoresetMode.SAME_STEP.value:
            mode = AutoresetMode.SAME_STEP  # for simulators that reset a lane in the step that ends it
        self.metadata = {**remote_metadata(world_info, options.render_mode), "autoreset_mode": mode}
        if world_info.reward_space is not None:
            self.reward_space = world_info.reward_space
        self.render_mode = options.render_mode or world_info.render_mode
        given = {"urls": urls, **options.keywords(), "num_envs": self.num_envs}
        self.spec: EnvSpec | None = remote_spec(None, given, world_info, self.render_mode)
        self.spec.vector_entry_point = VECTOR_ENTRY_POINT
        self.spec.kwargs["vectorization_mode"] = "vector_entry_point"

    # The interface of VectorEnv

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Request a new episode for all slots, and return at once.

        Args:
            seed: An integer seeds slot i with `seed + i`; a list has each slot's seed.
            options: For the environments' reset. `reset_mask`, a bool array `(num_envs,)`, selects the slots to reset;
                the others are unchanged.

        Returns:
            A tuple with an observation, or None, for each slot; and the infos.

        Raises:
            SettingError: The caller is one of Gymnasium's vector wrappers, which needs `make_vec_remote(…,
                blocking=True)`.
        """
        # Gymnasium's vector wrappers would fail on a None later, far from the cause.
        frame = inspect.currentframe()
        _refuse_batch_wrapper(frame.f_back if frame is not None else None)
        slots = self._slots
        with slots.order:
            slots.order.check("reset")
            slots.begin_reset(seed, options)
            return slots.take_results().as_universe()[::4]

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Apply actions to the slots that are in an episode; slots whose episode ended begin their next one.

        Args:
            actions: A batch of `action_space`. Entries of slots without an observation are not applied.

        Returns:
            A tuple with an observation, or None, for each slot; float64 rewards, bool terminations and truncations,
            each `(num_envs,)`; and the infos. Observations of up to 1 KiB are views of one array, a new one in each
            step.

        Raises:
            InvalidActionError: An action is not in its space; nothing was sent.
            ResetNeededError: `reset` was never called (U-8).
        """
        self.step_async(actions)
        return self.step_wait()

    def reset_async(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
        slot_options: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Send the requests of `reset`; `reset_wait` reads the answers. `slot_options` has further options per slot."""
        slots = self._slots
        with slots.order:
            slots.order.check("reset")
            slots.begin_reset(seed, options, slot_options)
            slots.order.pending = "reset"

    def reset_wait(self) -> tuple[Any, dict[str, Any]]:
        """Return the results since `reset_async`."""
        slots = self._slots
        return slots.order.wait("reset", lambda: slots.finish_reset().as_universe()[::4])

    def step_async(self, actions: Any) -> None:
        """Send the requests of `step`; `step_wait` reads the answers."""
        slots = self._slots
        with slots.order:
            slots.order.check("step")
            slots.begin_step(actions)
            slots.order.pending = "step"

    def step_wait(self) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Wait for the slots that are in an episode, each within `timeout`, and return the results."""
        slots = self._slots
        return slots.order.wait("step", lambda: slots.finish_step().as_universe())

    def wait_for_all(
        self,
        pending: Literal["reset", "step"],
        timeout: float | None = None,
        *,
        same_step: bool = False,
        on_lost: OnLost = "wait",
    ) -> Results:
        """Wait, after `reset_async` or `step_async`, until every slot has an observation.

        A slot whose remote environment was lost is truncated, with its last observation. `BlockingReset` and
        `SB3VecEnv` use this method.

        Args:
            pending: The asynchronous call.
            timeout: Seconds; None: the environment's own timeout.
            same_step: True: slots whose episodes ended begin the next ones now, and `Results.first` has their first
                observations.
            on_lost: The handling of a slot whose remote environment was lost: `wait`, `raise`, or `continue` with its
                last observation.

        Raises:
            RemoteTimeoutError: A slot has no observation yet. Call this method again to continue waiting.
            RemoteError: With `raise`, the reason of a loss.
            NothingPendingError: That call is not pending.
        """
        slots = self._slots
        seconds = slots.timeout if timeout is None else timeout
        return slots.order.wait(pending, slots.wait_for_all, seconds, same_step=same_step, on_lost=on_lost)

    def cancel(self) -> None:
        """Let the next `reset` abandon a pending asynchronous call, without waiting for it."""
        self._slots.order.cancel()

    def send(self, actions: Any, slots: Any = None) -> None:
        """Apply actions to some slots and return at once; `recv` returns the answers, whichever come first.

        So a slow slot delays no other one: step the slots that have answered, and leave the others time:

            envs = BlockingReset(make_vec_remote(urls))
            observations, infos = envs.reset(seed=0)
            envs.send(policy(observations))
            while training:
                slots, observations, *_ = envs.recv(at_least=48)
                envs.send(policy(observations), slots)

        A slot whose episode ended begins its next one instead (NEXT_STEP), and so does a slot that was lost, once it is
        connected again. The action is not applied then.

        Args:
            actions: A batch with one action for each of `slots`, in the same order.
            slots: Slot numbers, each once, with all lanes of a world side by side, as `recv` returns them. None: all.

        Raises:
            InvalidActionError: An action is not in its space; nothing was sent.
            AlreadyPendingError: The answer to a slot's last action was not taken yet; nothing was sent.
            ResetNeededError: `reset` was never called.
        """
        order = self._slots.order
        with order:
            order.check("send")
            self._slots.send(actions, slots)

    def recv(self, at_least: int = 1) -> Received:
        """Wait until at least this many slots have answered, and return the answers of all that have.

        Args:
            at_least: A number of slots, at most the number of slots whose answers are outstanding.

        Returns:
            The slots, an int64 array `(k,)` in rising order; and for these k slots a batch of observations, float64
            rewards, bool terminations and truncations, each `(k,)`, and infos, arrays `(k,)` with `_key` masks. A slot
            whose remote environment was lost is truncated, with its last observation and `infos["error"]`.

        Raises:
            RemoteTimeoutError: Too few slots answered within `timeout` seconds. Their answers stay for the next call.
            SettingError: Fewer answers are outstanding than `at_least`.
        """
        order = self._slots.order
        with order:
            order.check("recv")
            return self._slots.recv(at_least)

    @property
    def slot_states(self) -> Array:
        """The state of each slot: an int64 array `(num_envs,)` of `SlotState`."""
        return self._slots.states()

    def report(self) -> dict[str, float]:
        """Return the state of the slots and the cost of failures as numbers, ready for TensorBoard.

        Returns:
            `slots/running`, `slots/resetting`, `slots/connecting` and `slots/lost`; `stalled_seconds`, the time that
            calls waited for lost slots, including the silence before the loss was detected; `moves`, `losses`,
            `returns`, `episodes_cut`, `episodes_moved`, `steps_asked`, `steps_received` and `steps_lost` since the
            environment was made; and for each server, even if it was lost and has no slots any more,
            `servers/URL/slots`, `servers/URL/losses` and `servers/URL/seconds_away`.
        """
        return self._slots.report()

    def remotes(self) -> tuple[RemoteReport, ...]:
        """Return a report on each remote, spares last: whether it is away, since when and why, and the cost."""
        return self._slots.remote_reports()

    @property
    def timeout(self) -> float:
        """Seconds to wait for any answer."""
        return self._slots.timeout

    @property
    def fps(self) -> float | None:
        """Frames a second of the real-time worlds, of the fastest if they differ; None: they wait for actions."""
        infos = [remote.info for remote in self._slots.remotes()]
        return max((info.fps for info in infos if info and info.fps), default=None)

    @property
    def server_versions(self) -> tuple[str | None, ...]:
        """The version of each slot's server; None for a server of another package (U-12)."""
        infos = [remote.info for remote in self._slots.remote_of_each()]
        return tuple(info.server_version if info else None for info in infos)

    def latency_summary(self) -> tuple[dict[str, Any], ...]:
        """Return for each remote `url`, and percentiles of `round_trip` and `observation_age` in seconds (U-11)."""
        found = [(remote.url, remote.latency_summary()) for remote in self._slots.remotes()]
        return tuple({"url": url, **summary} for url, summary in found if summary is not None)

    @property
    def urls(self) -> tuple[str, ...]:
        """The URL of each slot's remote."""
        return tuple(remote.url for remote in self._slots.remote_of_each())

    # Messages

    def send_message(
        self,
        form: MessageForm,
        write: MessageWriter,
        slots: Sequence[int] | None = None,
        origins: Mapping[int, Origin] | None = None,
    ) -> MessageReply:
        """Send a message of a feature, or of another package. The servers must accept it (docs/plugins.md).

        Args:
            form: The form of the message.
            write: The bytes of the request, or a function that returns them for each world, given a `MessageTarget`.
                All lanes of a world get one request.
            slots: The slots that the message is for; None: all.
            origins: The earlier moments at which environments were in the situations that the message puts these slots
                into, for recordings; None: unknown.

        Returns:
            The answers; and, if environments were put into another situation, observations and infos as `reset` returns
            them: their episodes continue from there.

        Raises:
            RefusedError: As `RemoteEnv.send_message`. If other servers have put slots into another situation, these
                stay there, and the next `step` returns their observations.
            SettingError: A slot is out of range, or a request is larger than its form allows.
        """
        from bridge.core.client.messages import MessageReply

        answers = self.begin_message(form, write, slots)
        if not any(answer.placed for answer in answers):
            return MessageReply(answers)
        observations, infos = self.reset_wait()
        self.tell_placed(answers, observations, origins)
        return MessageReply(answers, (observations, infos))

    def listen_to_places(self, listener: PlaceListener) -> None:
        """Notify an object when a message puts slots into another situation. Only a weak reference is kept."""
        self._place_listeners.append(weakref.ref(listener))

    def moment(self, slot: int) -> str:
        """Return a name for what a slot has done so far, for recordings; empty: it is not recorded."""
        found = (listener() for listener in self._place_listeners)
        return " ".join(filter(None, (listener.moment(slot) for listener in found if listener is not None)))

    def tell_placed(
        self, answers: Iterable[MessageAnswer], observations: Sequence[Any], origins: Mapping[int, Origin] | None
    ) -> None:
        """Notify listeners of the new situations of slots. Callers of `begin_message` must call it."""
        for listener in [listener() for listener in self._place_listeners]:
            for answer in answers if listener is not None else ():
                for slot in answer.target.slots if answer.placed else ():
                    assert listener is not None, "looked at above"
                    listener.placed(slot, observations[slot], (origins or {}).get(slot))

    def begin_message(
        self, form: MessageForm, write: MessageWriter, slots: Sequence[int] | None = None
    ) -> list[MessageAnswer]:
        """Send a message as `send_message`, without observations: if slots were placed, `reset_wait` must follow."""
        with self._slots.order:
            self._slots.order.check(f"message {form.name}")
            answers, failure = self._slots.send_message(form, write, slots)
            if failure is not None:
                raise failure
            if any(answer.placed for answer in answers):
                self._slots.order.pending = "reset"
            return answers

    # Calls

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a public method of every environment, or read a public attribute; return one result per slot.

        Raises:
            MissingAttributeError: The environments have no attribute of that name: an AttributeError, and a
                RefusedError.
            RefusedError: A server has no method calls; the name is private, or `reset`, `step` or `close`; or this
                client shares a world with others.
            EnvironmentFailedError: The method raised, an AttributeError for example.
        """
        if name == "render" and not args and not kwargs:
            return self.render()
        return self.call_at(range(self.num_envs), name, *args, **kwargs)

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Send the requests of `call`; `call_wait` reads the answers."""
        with self._slots.order:
            self._slots.order.check("call")
            self._slots.begin_call(range(self.num_envs), name, args, kwargs)
            self._slots.order.pending = "call"

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Return the results of `call_async`, one per slot.

        Args:
            timeout: Seconds. After them the call stays pending, and `call_wait` can be called again. Any other call
                abandons it, and its late answers are dropped. None: the environment's own timeout, after which the
                remotes that have not answered are lost.

        Raises:
            RemoteTimeoutError: Some remotes have not answered; the message has their URLs.
            NothingPendingError: There was no `call_async`.
        """
        return self._slots.order.wait("call", self._slots.call_results, timeout)

    def call_at(self, slots: Sequence[int], name: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a public method in some slots only, or read a public attribute; results in the order of `slots`.

        Raises:
            SettingError: A slot is out of range.
            RefusedError: As `call`; or the lanes of a world can only be called all together.
        """
        with self._slots.order:
            self._slots.order.check(f"call of {name}")
            self._slots.begin_call(slots, name, args, kwargs)
            return self._slots.call_results()

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Read a public attribute of every environment; spaces and generators as copies. Raises as `call`."""
        # Spaces and generators do not travel as values: their known state is used.
        if name in ("observation_space", "action_space"):
            space = self.single_observation_space if name == "observation_space" else self.single_action_space
            return tuple(copy.deepcopy(space) for _ in range(self.num_envs))
        if name == "np_random":
            return self.np_random
        return self.call(name)

    def get_attr_at(self, slots: Sequence[int], name: str) -> tuple[Any, ...]:
        """Read a public attribute of the environments in some slots, in the order of `slots`.

        Calls nothing: a method is returned as a function that calls it in its slot.

        Raises:
            AttributeError: The environments have no attribute of that name.
            SettingError: A slot is out of range.
        """
        if name in ("observation_space", "action_space", "np_random"):
            found = self.get_attr(name)
            return tuple(found[slot] for slot in slots)
        try:
            with self._slots.order:
                self._slots.order.check(f"look at {name}")
                self._slots.begin_call(slots, name, (), {}, look=True)
                values = self._slots.looks()
        except RefusedError as error:
            # As in `RemoteEnv.get_wrapper_attr`: a server that does not tell is treated as one without the attribute.
            if error.code in (Code.NOT_FOUND, Code.PERMISSION_DENIED):
                raise AttributeError(f"the environments have no attribute {name!r}: {error}") from error
            if error.code != Code.UNIMPLEMENTED:
                raise
            # Lanes in other processes or in a simulator can only be called all together, and do not support look-ups.
            try:
                found = self.get_attr(name)
            except RefusedError as refusal:
                if refusal.code != Code.UNIMPLEMENTED:
                    raise
                raise AttributeError(f"the server does not say whether there is {name!r}: {refusal}") from refusal
            return tuple(found[slot] for slot in slots)
        return tuple(partial(self._call_in, slot, name) if slot not in values else values[slot] for slot in slots)

    def _call_in(self, slot: int, name: str, /, *args: Any, **kwargs: Any) -> Any:
        return self.call_at([slot], name, *args, **kwargs)[0]

    def set_attr(self, name: str, values: Any) -> None:
        """Set a public attribute: a list or tuple has a value for each slot, any other value is for all."""
        items = list(values) if isinstance(values, (list, tuple)) else [values] * self.num_envs
        if len(items) != self.num_envs:
            raise SettingError(f"expected {self.num_envs} values, one for each slot, got {len(items)}")
        self._slots.set_attr(name, items)

    def set_attr_at(self, slots: Sequence[int], name: str, value: Any) -> None:
        """Set a public attribute of some slots to one value; the other lanes of their worlds keep their values."""
        before: Sequence[Any] = (None,) * self.num_envs
        if self._slots.splits_worlds(slots):
            # The other lanes may not have the attribute, or a value that cannot be sent: only these slots are set.
            try:
                self.call_at(slots, "set_wrapper_attr", name, value)
                return
            except RefusedError as error:
                # Not supported by lanes of another process or a simulator, nor by an old Gym's, which has no such
                # method.
                if error.code not in (Code.UNIMPLEMENTED, Code.NOT_FOUND):
                    raise
            # All lanes are set together, the others to the values that they have.
            before = self.get_attr(name)
        items = [value if slot in set(slots) else before[slot] for slot in range(self.num_envs)]
        self._slots.set_attr(name, items, slots)

    def wrapper_classes(self) -> tuple[list[str], ...]:
        """Return the classes of each slot's wrappers as `module:name`, with base classes; empty if they are unknown."""
        try:
            found = self._slots.read_property("world.lane_wrappers")
        except RefusedError:
            return self._wrapper_classes_of_worlds()
        return tuple(different[index] for _, (different, indices) in found for index in indices)

    def _wrapper_classes_of_worlds(self) -> tuple[list[str], ...]:
        """Return `wrapper_classes` for older servers, which tell only those of the first lane of each world."""
        try:
            found = self._slots.read_property("world.wrappers")
        except RefusedError:
            return ([],) * self.num_envs
        return tuple(names for member, names in found for _ in range(member.lanes))

    def _read_property(self, key: str) -> list[Any]:
        """Read a property with one value per lane; return one value per slot."""
        return [value for _, found in self._slots.read_property(key) for value in found]

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """A generator for each slot in the state of its environment's: a copy, so draws do not affect the remote's."""
        return tuple(generator_of(state) for state in self._read_property("world.random"))

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of each slot's environment."""
        return tuple(state["seed"] for state in self._read_property("world.random"))

    def render(self) -> tuple[Any, ...]:
        """Return the frame of every slot in its environment's render mode."""
        return tuple(self._read_property("world.frame"))

    def close_extras(self, **kwargs: Any) -> None:
        """Leave the worlds and disconnect; worlds that were created for this environment are destroyed."""
        self._slots.close()

    def __copy__(self) -> RemoteVectorEnv:
        """Return a copy with connections of its own, as `copy.deepcopy`: closing one must not close the other."""
        return copy.deepcopy(self)

    def __del__(self) -> None:
        if "_slots" in self.__dict__ and not self.closed:  # otherwise __init__ was never called, or raised early
            self._slots.abandon()


class OwningVectorEnv(RemoteVectorEnv):
    """A vector environment that closes the object through which its servers are reached: a listener, or a proxy server.

    Args:
        end: Closes that object. Called by `close`, or if the environment cannot be made.
        urls: See `RemoteVectorEnv`.
        keywords: See `RemoteVectorEnv`.
    """

    def __init__(self, end: Callable[[], None], urls: str | Sequence[str] | Directory, **keywords: Any) -> None:
        # Before anything can raise: a listener that stays open would keep its port.
        self._end = end
        try:
            super().__init__(urls, **keywords)
        except BaseException:
            # The caller gets no object to close. An error of `end` would hide the current one.
            with contextlib.suppress(Exception):
                end()
            raise

    def close_extras(self, **kwargs: Any) -> None:
        """Leave the worlds, and close the object through which they were reached."""
        super().close_extras(**kwargs)
        self._end()

    def __del__(self) -> None:
        super().__del__()
        if "_slots" in self.__dict__ and not self.closed:  # otherwise it was closed already
            end_apart(self._end)


def slots_of(envs: VectorEnv[Any, Any, Any]) -> Slots:
    """Return the slots of a `RemoteVectorEnv`, wrapped or not, for code that steps or reads them.

    Raises:
        SettingError: The environment is of another kind.
    """
    base = envs.unwrapped
    if not isinstance(base, RemoteVectorEnv):
        raise SettingError(f"expected what make_vec_remote returns, got {envs!r} of type {type(envs).__name__}")
    return base._slots  # noqa: SLF001 - for the parts of this package, not for users


def _refuse_batch_wrapper(caller: FrameType | None) -> None:
    """Raise SettingError if the caller is one of Gymnasium's vector wrappers, which would fail on a None."""
    # A wrapper of the user's own may support None.
    if caller is None or not str(caller.f_globals.get("__name__", "")).startswith("gymnasium."):
        return
    wrapper = caller.f_locals.get("self")
    if isinstance(wrapper, VectorWrapper):
        raise SettingError(
            f"{type(wrapper).__name__} takes batched observations, but RemoteVectorEnv gives a tuple, with None for "
            "slots that reset: make the environment with make_vec_remote(…, blocking=True), and wrap that"
        )
