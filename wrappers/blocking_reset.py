"""Remote environments with the interface and semantics of Gymnasium's own vector environments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import iterate

from bridge.core.client.attributes import OwnAttributes
from bridge.core.client.envs.vector_env import RemoteVectorEnv, slots_of
from bridge.core.client.messages import MessageReply, MessageWriter
from bridge.core.client.options import checked_timeout
from bridge.core.client.slots.results import Results
from bridge.core.client.slots.slot import RemoteReport
from bridge.core.client.slots.stepper import OnLost, Received
from bridge.core.encoding.message_form import MessageForm, Origin
from bridge.core.encoding.tensors import Array
from bridge.core.extras import provided
from bridge.core.gymnasium_versions import BatchWrapper
from bridge.errors import Code, EnvironmentFailedError, RefusedError, ResetNeededError, SettingError

from .transparent import Transparent

__all__ = ["MAX_FAILURES", "BlockingReset", "block", "make_blocking"]

MAX_FAILURES = 10
"""The default of `max_failures`."""


class BlockingReset(OwnAttributes, BatchWrapper):
    """A vector environment whose `reset` and `step` wait for every slot's observation, and return batched arrays.

    The results equal those of `gymnasium.vector.SyncVectorEnv` with the same environments, seeds, actions and autoreset
    mode, so trainers and Gymnasium's vector wrappers work with it unchanged. A lost remote is reported as an
    ordinary truncation, with its last observation; the next `step` waits until it is back.

    Like Gymnasium's AsyncVectorEnv it has `step_async` and `step_wait`, `reset_async` and `reset_wait`, `call_async`
    and `call_wait`. After a timeout or Ctrl-C the call stays pending, and the same wait can be called again. A late
    response is never used for another request.

    Args:
        env: What `make_vec_remote` returns.
        timeout: Seconds that a slot may be without an observation before `step` or `reset` raises; None: the
            environment's own timeout.
        autoreset_mode: When a slot begins its next episode, an `AutoresetMode` or its value. NEXT_STEP: in the next
            `step`, which ignores the slot's action. SAME_STEP: in the step that ends the episode; `infos["final_obs"]`
            and `infos["final_info"]` contain its last observation and info. DISABLED: when
            `reset(options={"reset_mask": …})` selects the slot; until then `step` raises. Simulators that reset a lane
            in the step that ends it support only SAME_STEP.
        on_lost: What happens to a slot whose remote was lost, after the truncation that reports it. `wait`: `step`
            waits for it, at most `timeout` seconds, and prints every 5 s what it waits for. `raise`: `step` raises,
            unless a spare is ready. `continue`: the slot repeats its last observation with reward 0 until it is back,
            and `infos["valid"]`, bool, shape `(num_envs,)`, is False for it, also in the step that begins its next
            episode: no action made these transitions, so the training loop must leave them out. `step` always waits for
            a slot that has had no observation yet, and if every slot is lost.
        max_failures: `step` raises if this many episodes of a slot in a row ended with a failure of its environment;
            None: never.
        step_timeout: With `on_lost="continue"`: seconds after which a world that has not responded to a step counts as
            lost, so that the other slots can continue. Its slots (for lanes, all of them) are truncated once, and are
            not valid until they begin an episode, there or elsewhere; a late response is dropped. None: the
            environment's timeout, which always applies to resets.

    Raises:
        SettingError: `env` is another kind of environment, the mode is unknown, or the simulator supports only another.
    """

    env: RemoteVectorEnv

    def __init__(
        self,
        env: RemoteVectorEnv,
        timeout: float | None = None,
        *,
        autoreset_mode: AutoresetMode | Literal["NextStep", "SameStep", "Disabled"] = AutoresetMode.NEXT_STEP,
        on_lost: OnLost = "wait",
        max_failures: int | None = MAX_FAILURES,
        step_timeout: float | None = None,
    ) -> None:
        if not isinstance(env, (RemoteVectorEnv, Transparent)):
            raise SettingError(f"expected what make_vec_remote returns, got {env!r} of type {type(env).__name__}")
        super().__init__(env)
        # The server of a real-time world of lanes then responds when each lane has an observation, as a batch needs.
        slots_of(env).wait_for_lanes()
        try:
            self._mode = AutoresetMode(autoreset_mode)
        except ValueError:
            modes = ", ".join(f"{mode} ({mode.value!r})" for mode in AutoresetMode)
            raise SettingError(f"expected autoreset_mode to be one of {modes}, got {autoreset_mode!r}") from None
        self._native = env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
        if self._native and self._mode is not AutoresetMode.SAME_STEP:
            # Its next step acts in the new episode, so the action that NEXT_STEP ignores would be executed.
            raise SettingError(
                f"expected autoreset_mode=SAME_STEP, got autoreset_mode={self._mode.name}: the served simulator begins "
                "a lane's next episode in the same step that ends the old one; give "
                "autoreset_mode=AutoresetMode.SAME_STEP"
            )
        if on_lost not in ("wait", "raise", "continue"):
            raise SettingError(f"expected on_lost to be 'wait', 'raise' or 'continue', got {on_lost!r}")
        if max_failures is not None and (not isinstance(max_failures, int) or max_failures < 1):
            raise SettingError(f"expected max_failures to be a positive integer or None, got {max_failures!r}")
        if step_timeout is not None:
            checked_timeout(step_timeout, "step_timeout")
            if on_lost != "continue":
                raise SettingError(
                    f"expected on_lost='continue' with step_timeout={step_timeout!r}, got on_lost={on_lost!r}: a loop "
                    "that waits for lost slots gains nothing by giving a slow world up"
                )
            slots_of(env).limit_steps(float(step_timeout))
        self._on_lost, self._max_failures, self._step_timeout = on_lost, max_failures, step_timeout
        self._failures: dict[int, int] = {}
        self._observed: Array = np.zeros(env.num_envs, np.bool_)
        self._own_timeout = timeout
        self._timeout = env.timeout if timeout is None else checked_timeout(timeout)
        self.metadata = {**env.metadata, "autoreset_mode": self._mode}
        self._finished: Array = np.zeros(env.num_envs, np.bool_)
        self._reset_mask: Array | None = None

    @property
    def autoreset_mode(self) -> AutoresetMode:
        """When a slot begins its next episode."""
        return self._mode

    @property
    def timeout(self) -> float:
        """Seconds that a slot may be without an observation."""
        return self._timeout

    @property
    def on_lost(self) -> OnLost:
        """What happens to a slot whose remote was lost."""
        return self._on_lost

    @property
    def max_failures(self) -> int | None:
        """How many episodes in a row may fail in a slot before `step` raises; None: any number."""
        return self._max_failures

    @property
    def spec(self) -> EnvSpec | None:
        """The spec to make another one with `gymnasium.make_vec(envs.spec)`."""
        spec = copy.deepcopy(self.env.spec)
        if spec is not None:
            spec.kwargs["autoreset_mode"] = self._mode.value
            if self._own_timeout is not None:
                spec.kwargs["blocking_timeout"] = self._own_timeout
            if self._on_lost != "wait":
                spec.kwargs["on_lost"] = self._on_lost
            if self._max_failures != MAX_FAILURES:
                spec.kwargs["max_failures"] = self._max_failures
            if self._step_timeout is not None:
                spec.kwargs["step_timeout"] = self._step_timeout
        return spec

    @spec.setter
    def spec(self, spec: EnvSpec | None) -> None:
        self.env.spec = spec

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every slot, or in those of `options["reset_mask"]`, and wait for the observations.

        Args:
            seed: An integer seeds slot i with `seed + i`; a list has one seed per slot.
            options: For the environments' reset, and `reset_mask`, bool, shape `(num_envs,)`. The dict is not changed.

        Returns:
            A batch of `observation_space`, and the infos.

        Raises:
            RemoteTimeoutError: A slot has no observation after `timeout` seconds.
        """
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    def reset_async(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
        *,
        slot_options: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """Send the requests of `reset`; `reset_wait` returns the results. `slot_options`: options for single slots."""
        self.env.reset_async(seed=seed, options=options, slot_options=slot_options)
        mask = (options or {}).get("reset_mask")
        # A copy: the caller may write into its mask before `reset_wait`.
        self._reset_mask = np.ones(self.num_envs, np.bool_) if mask is None else np.array(mask)

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Return what `reset` returns, after `reset_async`.

        Args:
            timeout: Seconds to wait; None: as long as `reset` does.

        Raises:
            RemoteTimeoutError: A slot has no observation yet; `reset_wait` can be called again.
            NothingPendingError: There was no `reset_async`.
        """
        results = self.wait_for_all("reset", timeout)
        return results.batched(), results.merged_infos()

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Apply an action in every slot; the autoreset mode says what happens to slots whose episodes ended.

        Args:
            actions: A batch of `action_space`.

        Returns:
            A batch of `observation_space`, float64 rewards, bool terminations and truncations, each `(num_envs,)`, and
            the infos.

        Raises:
            InvalidActionError: An action is not in its space; nothing was sent.
            ResetNeededError: `reset` was never called; or, in the mode DISABLED, a slot's episode has ended.
            RemoteTimeoutError: A slot has no observation after `timeout` seconds.
            EnvironmentFailedError: The last `max_failures` episodes of a slot ended with a failure of its environment.
            RemoteError: With `on_lost="raise"`, a remote was lost.
        """
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Send the actions and return at once; `step_wait` returns the results."""
        if self._mode is AutoresetMode.DISABLED and self._finished.any():
            raise ResetNeededError(
                f"expected slots in an episode, but those of {np.flatnonzero(self._finished).tolist()} have ended; "
                "call reset(options={'reset_mask': terminations | truncations})"
            )
        if self._mode is AutoresetMode.SAME_STEP and not self._native and self._step_timeout is None:
            # With `step_timeout`, a reset may take longer than a step.
            slots_of(self.env).begin_in_step()
        self.env.step_async(actions)

    def step_wait(self, timeout: float | None = None) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Return what `step` returns, after `step_async`.

        Args:
            timeout: Seconds to wait; None: as long as `step` does.

        Raises:
            RemoteTimeoutError: A slot has no observation yet; `step_wait` or `reset` can be called.
            NothingPendingError: There was no `step_async`.
        """
        results = self.wait_for_all("step", timeout)
        batch = results.batch
        return results.batched(), batch.rewards, batch.terminations, batch.truncations, results.merged_infos()

    def wait_for_all(self, pending: Literal["reset", "step"], timeout: float | None = None) -> Results:
        """Wait for the results of `reset_async` or `step_async`, and record whose episodes ended.

        Args:
            pending: The pending call.
            timeout: Seconds to wait; None: as long as `reset` and `step` do.

        Raises:
            RemoteTimeoutError: A slot has no observation yet; this method can be called again.
            NothingPendingError: That call is not pending.
        """
        seconds = self._timeout if timeout is None else timeout
        same_step = pending == "step" and self._mode is AutoresetMode.SAME_STEP and not self._native
        results = self.env.wait_for_all(pending, seconds, same_step=same_step, on_lost=self._on_lost)
        if pending == "step":
            if self._mode is AutoresetMode.DISABLED:  # in the other modes the next episodes begin automatically
                self._finished = results.ended
            if results.errors or results.failures or self._failures:
                self._raise_lost(results)
                self._count_failures(results, results.ended)
        # Slots outside the mask may have ended, and still need a reset.
        elif self._reset_mask is not None:
            self._finished = self._finished & ~self._reset_mask
            if results.failures:
                # Like a single environment's slot, such a lane has no new observation, only its last one.
                self._finished[list(results.failures)] = True
                raise next(iter(results.failures.values()))
        if self._on_lost == "continue":
            self._mark_valid(results, pending)
        return results

    def _raise_lost(self, results: Results) -> None:
        if self._on_lost != "raise":
            return
        for slot, error in results.errors.items():
            # A server that refuses, for example because the environment failed, is not lost; `max_failures` applies to
            # it. A ready spare replaces a lost one.
            if not isinstance(error, RefusedError) and not slots_of(self.env).has_spare(slot):
                raise error

    def _count_failures(self, results: Results, ended: Array) -> None:
        """Raise an error if a slot's environment fails in every episode."""
        for slot in np.flatnonzero(ended).tolist():
            error = results.errors.get(slot) or results.failures.get(slot)
            failures = self._failures.pop(slot, 0) + 1
            if not isinstance(error, EnvironmentFailedError):
                continue
            self._failures[slot] = failures
            if failures == self._max_failures:
                # If the caller catches the error and continues, the count begins again.
                self._failures.clear()
                text = f"the last {self._max_failures} episodes of slot {slot} ended by failures of the environment: "
                raise EnvironmentFailedError(error.url, text + error.reason, Code.INTERNAL)

    def _mark_valid(self, results: Results, pending: str) -> None:
        """Report which transitions are valid: neither lost ones, nor the first observation after a loss."""
        observed = results.valid.copy()
        observed[list(results.failures)] = False
        if pending == "reset" and self._reset_mask is not None:
            observed = np.where(self._reset_mask, observed, self._observed)
        results.common["valid"] = observed if pending == "reset" else observed & self._observed
        self._observed = observed.copy()

    def send_message(
        self,
        form: MessageForm,
        write: MessageWriter,
        slots: Sequence[int] | None = None,
        origins: Mapping[int, Origin] | None = None,
    ) -> MessageReply:
        """Send a message of a feature or package, like `RemoteVectorEnv.send_message`; the result is batched."""
        answers = self.env.begin_message(form, write, slots)
        mask: Array = np.zeros(self.num_envs, np.bool_)
        for answer in answers:
            mask[list(answer.target.slots)] = answer.placed
        if not mask.any():
            return MessageReply(answers)
        self._reset_mask = mask
        observations, infos = self.reset_wait()
        self.env.tell_placed(answers, list(iterate(self.observation_space, observations)), origins)
        return MessageReply(answers, (observations, infos))

    def send(self, actions: Any, slots: Any = None) -> None:
        """Apply actions to some slots and return at once, like `RemoteVectorEnv.send`."""
        self.env.send(actions, slots)

    def recv(self, at_least: int = 1) -> Received:
        """Wait until at least `at_least` slots have results, and return all results, like `RemoteVectorEnv.recv`."""
        return self.env.recv(at_least)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a public method of every environment, or read a public attribute; return a result for each slot."""
        return self.env.call(name, *args, **kwargs)

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Send the calls and return at once; `call_wait` returns the results."""
        self.env.call_async(name, *args, **kwargs)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Return the results of `call_async`. After a timeout it can be called again."""
        return self.env.call_wait(timeout)

    def remotes(self) -> tuple[RemoteReport, ...]:
        """Return a report on each remote, like `RemoteVectorEnv.remotes`."""
        return self.env.remotes()

    def report(self) -> dict[str, float]:
        """Return the slots' health in numbers, like `RemoteVectorEnv.report`."""
        return self.env.report()

    def latency_summary(self) -> tuple[dict[str, Any], ...]:
        """Return percentiles of each remote's latency in seconds, like `RemoteVectorEnv.latency_summary`."""
        return self.env.latency_summary()

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Read a public attribute of every environment."""
        return self.env.get_attr(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set a public attribute: a list or tuple has one value per slot, any other value is for all slots."""
        self.env.set_attr(name, values)


def make_blocking(
    num_envs: int = 1,
    *,
    urls: str | Sequence[str] | None = None,
    url: str | None = None,
    **kwargs: Any,
) -> BlockingReset:
    """Return the environment for `gymnasium.make_vec("bridge:bridge/Remote-v0", …)`.

    Args:
        num_envs: The number of slots; 1, Gymnasium's default, means as many as the URLs provide.
        urls: As for `make_vec_remote`.
        url: One URL, as for `make_remote`; give this or `urls`.
        kwargs: As for `make_vec_remote` with `blocking=True`.

    Raises:
        SettingError: Both or neither of `urls` and `url` were given.
    """
    if (urls is None) == (url is None):
        raise SettingError(f"expected urls=[…] or url=…, got urls={urls!r} and url={url!r}")
    target = urls if urls is not None else str(url)
    envs = provided("make_vec_remote")(target, num_envs=None if num_envs == 1 else num_envs, blocking=True, **kwargs)
    assert isinstance(envs, BlockingReset)
    return envs


def block(make: Callable[[], RemoteVectorEnv], blocking_timeout: float | None = None, **keywords: Any) -> BlockingReset:
    """Return the environment for `make_vec_remote` with `blocking=True`.

    Args:
        make: Makes the remote environment.
        blocking_timeout: The `timeout` of `BlockingReset`.
        keywords: Other keywords of `BlockingReset`.
    """
    env = make()
    try:
        return BlockingReset(env, blocking_timeout, **keywords)
    except BaseException:
        env.close()
        raise
