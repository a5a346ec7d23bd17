"""A recorder on the client, for servers of other packages. It writes the same files as a server's own recording."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import iterate

from bridge.core.client.attributes import OwnAttributes
from bridge.core.client.envs.vector_env import RemoteVectorEnv
from bridge.core.client.messages import MessageReply, MessageWriter
from bridge.core.encoding.message_form import MessageForm, Origin
from bridge.core.encoding.tensors import Array
from bridge.core.gymnasium_versions import BatchWrapper
from bridge.core.worlds.environment import kept
from bridge.errors import SettingError, UsageError
from bridge.recording.record import Recording
from bridge.recording.slot_recorder import SlotRecorder

__all__ = ["Recorder"]


def _parts(space: Space[Any], batch: Any) -> list[Any]:
    """Return each slot's part of a batch as a copy: the arrays are the caller's, and rows are encoded later."""
    return kept(list(iterate(space, batch)))  # type: ignore[no-any-return]


class _Slot:
    """The state of a slot."""

    def __init__(self) -> None:
        self.running = False
        """True if the slot is in an episode."""
        self.seed: int | None = None
        self.options: Any = None


class Recorder(OwnAttributes, BatchWrapper):
    """A wrapper that records remote environments, as far as the client sees them.

    Each slot is recorded as an environment. A recording on the server (`serve_gym(record=…)`) contains more: what other
    clients do, and in real time every frame.

    Examples:
        >>> import tempfile
        >>> from bridge import Recorder, make_vec_remote, serve_gym
        >>> from bridge.wrappers import BlockingReset
        >>> folder = tempfile.mkdtemp()
        >>> with serve_gym("CartPole-v1") as server:
        ...     envs = Recorder(BlockingReset(make_vec_remote(server.url, num_envs=2)), folder)
        ...     observations, infos = envs.reset(seed=0)
        ...     observations, *_ = envs.step(envs.action_space.sample())
        ...     envs.close()

    Args:
        env: The result of `make_vec_remote`, or a `BlockingReset` around it.
        folder: The folder for the files; created if it does not exist.
        observations: True to record observations; otherwise only their hashes are recorded.
        player: The player: `agent` or `person`, optionally with a name as in `agent:PPO`.
        max_bytes: The most bytes of the recording; beyond it, the oldest file is deleted. None: no limit.

    Raises:
        SettingError: The folder cannot be written, or `env` is another kind of environment.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Array],
        folder: str | os.PathLike[str],
        *,
        observations: bool = False,
        player: str = "agent",
        max_bytes: int | None = None,
    ) -> None:
        base = env.unwrapped
        if not isinstance(base, RemoteVectorEnv):
            raise SettingError(f"expected what make_vec_remote returns, got {env!r} of type {type(env).__name__}")
        super().__init__(env)
        self._recorder = SlotRecorder(env, Recording(folder, observations, max_bytes=max_bytes))
        self.run = self._recorder.run
        """The name of the recording."""
        self._player = player
        self._bare = env.observation_space if env is base else None
        self._same_step = env is not base and env.metadata.get("autoreset_mode") is AutoresetMode.SAME_STEP
        self._slots = [_Slot() for _ in range(env.num_envs)]
        self._given: Any = None
        self._untold = False
        """True if a reset or a step was sent whose results were not returned yet."""
        self._open = True
        """True while it records."""
        base.listen_to_places(self)

    # Implements `PlaceListener`, for slots that continue elsewhere

    def moment(self, slot: int) -> str:
        """Return a name for the current point in a slot's recording; empty if it is in no episode."""
        return self._recorder.moment(slot) if self._slots[slot].running else ""

    def placed(self, slot: int, observation: Any, origin: Origin | None) -> None:
        """Record that a slot continues in an episode that is a branch of another one."""
        state = self._slots[slot]
        if observation is None:  # its server was lost meanwhile
            state.running = False
            return
        self._recorder.branch(slot, observation, origin)
        state.running, state.seed, state.options = True, None, None

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin episodes in the wrapped environment."""
        # The mask selects the slots to reset; it is not an option for an environment.
        mask = (options or {}).get("reset_mask")
        rest = {key: kept(value) for key, value in (options or {}).items() if key != "reset_mask"} or None
        chosen = np.ones(self.num_envs, np.bool_) if mask is None else np.asarray(mask, np.bool_)
        with self._sending():
            observations, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        errors = self._errors_of(infos)
        for index, (slot, observation) in enumerate(zip(self._slots, self._split(observations), strict=True)):
            if chosen[index]:
                slot.running, slot.options = False, rest
                slot.seed = seed[index] if isinstance(seed, Sequence) else None if seed is None else int(seed) + index
                if observation is not None and not errors[index]:
                    self._begin(index, observation)
        return observations, infos

    def _errors_of(self, infos: dict[str, Any]) -> list[str]:
        """Return for each slot why it is lost, or "". The observation of a lost slot is old, or None."""
        # An environment may have an info of this name, too, with another type.
        told: Any = infos.get("error")
        told = told if np.ndim(told) == 1 else [None] * self.num_envs
        return [error if isinstance(error, str) else "" for error in told]

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Apply actions in the wrapped environment."""
        given = _parts(self.env.action_space, actions)
        with self._sending(given):
            result = self.env.step(actions)
        return self._record(given, result)

    def step_async(self, actions: Any) -> None:
        """Send the actions and return at once; `step_wait` returns the results."""
        given, waiting = _parts(self.env.action_space, actions), cast(Any, self.env)
        with self._sending(given):
            waiting.step_async(actions)
        self._given, self._untold = given, True

    def step_wait(self) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Return the results of the step after `step_async`."""
        result = cast(Any, self.env).step_wait()
        self._untold = False
        return self._record(self._given, result)

    @contextlib.contextmanager
    def _sending(self, given: Any = None) -> Iterator[None]:
        """Send a reset or a step. If the previous call returned no results, leave that out of the recording.

        Args:
            given: The actions of a step. If it raises, `step_wait` may still return its results.
        """
        try:
            yield
        except UsageError:  # nothing was sent
            raise
        except BaseException:
            self._given, self._untold = given, True
            raise
        if self._untold:
            self._untold = False
            self._recorder.skip()

    def _record(self, given: list[Any], result: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Record a step, and return its results."""
        observations, rewards, terminations, truncations, infos = result
        finals = infos.get("final_obs") if self._same_step else None
        errors = self._errors_of(infos)
        acted = self._interventions(infos, terminations | truncations)
        # In the mode SAME_STEP, the values for the end of an episode are in `final_obs` and `final_info`.
        last_errors = self._errors_of(infos.get("final_info", {})) if finals is not None else errors
        for index, observation in enumerate(self._split(observations)):
            slot, ended = self._slots[index], bool(terminations[index] or truncations[index])
            # Otherwise it is the environment's own info.
            error = last_errors[index] or errors[index] if truncations[index] or not slot.running else ""
            begins = observation is not None and not errors[index]
            # After an end, the next step begins the slot's episode: its observation is that of a reset, and its action
            # was ignored. In the mode SAME_STEP this happens only if the reset within the last step failed.
            if not slot.running:
                if begins and (not ended or finals is not None):
                    self._begin(index, observation)
                continue
            # In the mode SAME_STEP the observation is the next episode's first one.
            last = finals[index] if finals is not None and ended else observation
            # A slot that lost its server has no results until it is back.
            if last is None and not error:
                continue
            if error:
                self._recorder.fail(index, self._player, given[index], error)
            else:
                by, action = acted.get(index, (self._player, given[index]))
                flags = {"terminated": bool(terminations[index]), "truncated": bool(truncations[index])}
                self._recorder.step(index, by, action, last, rewards[index], **flags)
            slot.running = not (ended or error)
            if finals is not None and ended and begins:
                self._begin(index, observation)
        return observations, rewards, terminations, truncations, infos

    def _interventions(self, infos: dict[str, Any], ended: Array) -> dict[int, tuple[str, Any]]:
        """Return the players that acted instead of `player` in a step, with their actions, by slot."""
        found = self._recorder.interventions(infos)
        if not self._same_step:
            return found
        # The infos of a slot that ended are those of its next episode; the step's own infos are in `final_info`.
        last = self._recorder.interventions(infos.get("final_info") or {})
        return {
            slot: acted
            for told, over in ((found, False), (last, True))
            for slot, acted in told.items()
            if ended[slot] == over
        }

    def _begin(self, index: int, observation: Any) -> None:
        """Record the first observation of an episode."""
        slot = self._slots[index]
        self._recorder.reset(index, observation, slot.seed, slot.options)
        slot.running, slot.seed, slot.options = True, None, None

    def _split(self, observations: Any) -> list[Any]:
        """Return a copy of each slot's observation; None if it has none."""
        return kept(list(observations)) if self._bare is not None else _parts(self.env.observation_space, observations)

    def send_message(
        self,
        form: MessageForm,
        write: MessageWriter,
        slots: Sequence[int] | None = None,
        origins: Mapping[int, Origin] | None = None,
    ) -> MessageReply:
        """Send a message of a feature, or of another package, like `RemoteVectorEnv.send_message`."""
        # If the message puts slots elsewhere, `placed` is called.
        sender: Any = self.env
        reply: MessageReply = sender.send_message(form, write, slots, origins)
        return reply

    def send(self, actions: Any, slots: Any = None) -> None:
        """Raise an error: steps of single slots are not recorded."""
        raise SettingError("Recorder takes step(), not send() and recv(); have the server record: serve_gym(record=…)")

    recv = send

    def close(self, **kwargs: Any) -> None:
        """Close the environments, and finish the recording."""
        super().close(**kwargs)
        self._recorder.close()
