"""A recorder on the client, for servers that are not ours: the same files as a server's own recording."""

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
    """Return each slot's part of a batch, a copy: the arrays are the caller's, and rows are encoded later."""
    return kept(list(iterate(space, batch)))  # type: ignore[no-any-return]


class _Slot:
    """The state of a slot."""

    def __init__(self) -> None:
        self.running = False
        """True if it is in an episode."""
        self.seed: int | None = None
        self.options: Any = None


class Recorder(OwnAttributes, BatchWrapper):
    """Records what goes through remote environments, as far as the client sees it.

    Each slot is an environment of the recording. Where a server can record itself (`serve_gym(record=…)`), that sees
    more: what other clients do, and in real time every frame.

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
        env: What `make_vec_remote` returns, or `BlockingReset` around it.
        folder: Where the files go; made where there is none.
        observations: Whether observations are recorded; otherwise their hashes are.
        player: Who acts: `agent` or `person`, with a name as in `agent:PPO`.
        max_bytes: The most bytes of the recording, after which its oldest file is deleted; None: no limit.

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
        """True if results of a reset or a step have not been told."""
        self._open = True
        """True if the recording goes on."""
        base.listen_to_places(self)

    # Where slots go on: as a `PlaceListener`

    def moment(self, slot: int) -> str:
        """Return a name for what a slot has done so far; empty: it is in no episode."""
        return self._recorder.moment(slot) if self._slots[slot].running else ""

    def placed(self, slot: int, observation: Any, origin: Origin | None) -> None:
        """Record that a slot goes on in an episode that is a branch of another one."""
        state = self._slots[slot]
        if observation is None:  # its server was lost meanwhile
            state.running = False
            return
        self._recorder.branch(slot, observation, origin)
        state.running, state.seed, state.options = True, None, None

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin episodes, as the environment does."""
        # The mask says which slots are reset; to an environment it is no option.
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
        """Return for each slot why it is lost; empty: it is not. A lost slot's observation is an old one or None."""
        # An environment may have an info of this name, too, of another kind.
        told: Any = infos.get("error")
        told = told if np.ndim(told) == 1 else [None] * self.num_envs
        return [error if isinstance(error, str) else "" for error in told]

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Apply actions, as the environment does."""
        given = _parts(self.env.action_space, actions)
        with self._sending(given):
            result = self.env.step(actions)
        return self._record(given, result)

    def step_async(self, actions: Any) -> None:
        """Send the actions and return at once, as the environment does; `step_wait` returns the results."""
        given, waiting = _parts(self.env.action_space, actions), cast(Any, self.env)
        with self._sending(given):
            waiting.step_async(actions)
        self._given, self._untold = given, True

    def step_wait(self) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Return what `step` returns, after `step_async`."""
        result = cast(Any, self.env).step_wait()
        self._untold = False
        return self._record(self._given, result)

    @contextlib.contextmanager
    def _sending(self, given: Any = None) -> Iterator[None]:
        """Send a reset or a step. Where the call before it returned no results, leave that out of the recording.

        Args:
            given: The actions of a step. Where it raises, `step_wait` may still tell its results.
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
        # In the mode SAME_STEP what ended an episode is told with its end.
        last_errors = self._errors_of(infos.get("final_info", {})) if finals is not None else errors
        for index, observation in enumerate(self._split(observations)):
            slot, ended = self._slots[index], bool(terminations[index] or truncations[index])
            # Else the environment's own.
            error = last_errors[index] or errors[index] if truncations[index] or not slot.running else ""
            begins = observation is not None and not errors[index]
            # After an end, the next step begins the slot's episode: its observation is that of a reset, and its action
            # was ignored. In the mode SAME_STEP it is the next one where the reset within the last one failed.
            if not slot.running:
                if begins and (not ended or finals is not None):
                    self._begin(index, observation)
                continue
            # In the mode SAME_STEP the observation is the first of the next episode already.
            last = finals[index] if finals is not None and ended else observation
            # A slot that lost its server has nothing to tell until it is back.
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
        """Return who acted in place of the player in a step, and the action, by slot."""
        found = self._recorder.interventions(infos)
        if not self._same_step:
            return found
        # The infos of a slot that ended are those of its next episode; the step's own are in `final_info`.
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
        """Return each slot's observation, a copy; None: it has none."""
        return kept(list(observations)) if self._bare is not None else _parts(self.env.observation_space, observations)

    def send_message(
        self,
        form: MessageForm,
        write: MessageWriter,
        slots: Sequence[int] | None = None,
        origins: Mapping[int, Origin] | None = None,
    ) -> MessageReply:
        """Send a message of a feature, or of another package; as `RemoteVectorEnv.send_message`."""
        # Where slots are put elsewhere by it, `placed` is called.
        sender: Any = self.env
        reply: MessageReply = sender.send_message(form, write, slots, origins)
        return reply

    def send(self, actions: Any, slots: Any = None) -> None:
        """Refuse: steps of some slots are not recorded."""
        raise SettingError("Recorder takes step(), not send() and recv(); have the server record: serve_gym(record=…)")

    recv = send

    def close(self, **kwargs: Any) -> None:
        """Close the environments, and write the recording to its end."""
        super().close(**kwargs)
        self._recorder.close()
