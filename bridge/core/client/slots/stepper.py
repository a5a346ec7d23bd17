"""Sends Resets and Steps to the members of a pool, and gathers their answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypeAlias

import numpy as np

from bridge.core.client.slots.resets import plan_resets, reset_settings
from bridge.core.client.slots.results import Results
from bridge.core.client.slots.slot import SETTLED, STEPPED, EpisodeEvent, EpisodeState, LinkState, Member, SlotState
from bridge.core.client.slots.vector_pool import VectorPool
from bridge.core.encoding.spaces import Layout
from bridge.core.encoding.tensors import Array, pack_tensor
from bridge.core.logs import SafeLog
from bridge.errors import (
    AlreadyPendingError,
    EnvironmentFailedError,
    RemoteTimeoutError,
    ResetNeededError,
    SettingError,
)
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["OnLost", "Received", "Stepper", "gather_all"]

_log = SafeLog(__name__)
# Seconds between two reports of a wait.
_PERIOD = 5.0
_MOST_LINES = 5

OnLost: TypeAlias = Literal["wait", "raise", "continue"]
"""What to do with slots whose remote was lost: wait for them, raise, or continue with their last observations."""


def gather_all(pool: VectorPool, timeout: float, on_lost: OnLost) -> None:
    """Wait until every slot has an observation, except slots that `on_lost` excludes; see `Stepper.wait_for_all`."""
    slot_members = pool.members
    members = slot_members.filling
    first = 0
    began = since = time.monotonic()
    late = members[0]  # the member that we wait for; time before `since` is counted already
    tell_at = began + _PERIOD

    def tolerated(member: Member) -> bool:
        """Return True if we do not wait for a slot without an observation; raise its error if `on_lost` says so."""
        # A moving slot is not `away`, and a reconnecting slot is not offline: neither raises.
        gone = on_lost == "raise" and member.away and member.link is LinkState.OFFLINE
        if gone and member.error is not None and not pool.has_spare(member):
            raise member.error
        # If every slot is away, wait: there would be only repeated observations.
        return on_lost == "continue" and member.away and not all(other.away for other in members)

    def enough() -> bool:
        nonlocal first, late, since, tell_at
        # Check a flag, because this runs after each answer: a loop over all slots would take n² time in a step.
        if pool.has_errors:
            pool.raise_permanent_error()
            first = 0
        while first < len(members) and (
            members[first].episode in SETTLED or (on_lost != "wait" and tolerated(members[first]))
        ):
            first += 1
        # Count only the time that lost slots cost, not the time of environments. It begins with the silence before the
        # loss was noticed, even if the wait for this slot is over because its end was reported or a spare took over.
        lost = late.lost_at is not None
        if lost or first < len(members):
            now = time.monotonic()
            if lost:
                pool.stalled += now - since
            if lost or members[first] is not late:
                since = now
        if first < len(members):
            late = members[first]
            if now >= tell_at:
                tell_at = now + _PERIOD
                _tell(members, now - began, timeout)
        return first == len(members)

    if not pool.gather(enough, began + timeout):
        missing = [member for member in members if not (member.episode in SETTLED or tolerated(member))]
        raise RemoteTimeoutError(
            ", ".join(dict.fromkeys(member.remote.url for member in missing)),
            f"no observation within {timeout:g} s: {'; '.join(_describe(missing))}",
        )


def _tell(members: Sequence[Member], waited: float, timeout: float) -> None:
    """Log what we wait for, in a few lines."""
    lines = _describe([member for member in members if member.episode not in SETTLED])
    # A lost fleet may have thousands of servers.
    for line in lines[:_MOST_LINES]:
        _log.warning("waiting %.0f s of at most %g s for %s", waited, timeout, line)
    if len(lines) > _MOST_LINES:
        _log.warning("and %d further lines like these, which are left out", len(lines) - _MOST_LINES)


def _describe(late: Sequence[Member]) -> list[str]:
    """Describe late members: slots, server, state and reason, in one line for all with the same reason."""
    titles: dict[str, list[str]] = {}
    for member in late:
        reason = f": {member.error.reason}" if member.error is not None else ""
        # A slot in an episode waits for its step's answer; `running` would read as if all were well.
        state = "no answer yet" if member.state is SlotState.RUNNING else member.state.name.lower()
        why = f"({member.remote.url}), {state}{reason.partition(chr(10))[0]}"
        titles.setdefault(why, []).append(member.title)
    return [f"{own[0]}{f' and {len(own) - 1} more' if own[1:] else ''} {why}" for why, own in titles.items()]


# The states with something to hand out, which is an answer or the end of a cut episode; and those where it will come.
_HERE = frozenset({EpisodeState.BEGUN, EpisodeState.ANSWERED, EpisodeState.RENEWED, EpisodeState.CUT})
_COMING = frozenset(EpisodeState) - {EpisodeState.RUNNING, EpisodeState.ENDED}
# Seconds that `finish_step` waits if no slot has an observation, so that a loop over it does not spin.
_PACE = 0.02
Received = tuple[Array, Any, Array, Array, Array, dict[str, Any]]
"""Slots, observations, rewards, terminations, truncations and infos."""


class Stepper:
    """Steps the slots of a pool.

    Args:
        pool: The pool of the slots.
        pacer: The initial value of the attribute `pacer`.
    """

    def __init__(self, pool: VectorPool, pacer: Callable[[], None] | None = None) -> None:
        self.pool = pool
        self._members, self._policy = pool.members, pool.policy
        self.pacer = pacer
        """Called in each step between sending actions and requesting their results."""
        world_info = self._members.world_info()
        self._observation_layout = Layout(world_info.observation_space, "observation")
        self._action_layout = Layout(world_info.action_space, "action")
        self._reward_space = world_info.reward_space
        self._tells = True
        """False in a reset, which returns no flags: the ends of cut episodes are kept for the next step."""
        self.begins_in_step = False
        """Set before a step: lanes that end in the step begin their next episodes in the same request, if their server
        supports that. It applies to that step only."""
        self._in_step = False
        self._stepped: Results | None = None
        """The results of a step in SAME_STEP mode, while the next episodes of slots that ended begin; None: there is no
        such step."""
        self._unbegun: dict[int, EnvironmentFailedError] = {}
        """Why lanes could not begin their next episodes in the step that ended their last ones (SAME_STEP), by slot."""

    def begin_reset(
        self,
        seed: int | Sequence[int | None] | None,
        options: Mapping[str, Any] | None,
        slot_options: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Check and send the Resets.

        Args:
            seed: The argument of `reset`.
            options: The argument of `reset`; the dict is not changed.
            slot_options: Additional options for each slot.

        Raises:
            SettingError: Seeds or options cannot be sent, or the lanes of one world were given different options.
        """
        self._stepped, self._tells = None, False
        self.pool.drain()
        # Make all Resets before sending the first one: if one cannot be sent, no slot is changed.
        for plan in plan_resets(self._members, seed, options, slot_options, started=self.pool.started):
            self._send_reset(*plan)
        mask = (options or {}).get("reset_mask")
        self._unbegun = {} if mask is None else {slot: why for slot, why in self._unbegun.items() if not mask[slot]}
        self.pool.check_deadlines(time.monotonic())
        self.pool.started = True

    def _send_reset(
        self, member: Member, settings: Mapping[str, pb.Tensor], seeds: Sequence[int | None] | None
    ) -> None:
        """Send a member's Reset, or keep it until a world is joined."""
        if seeds is not None:
            member.seeds = [old if new is None else new for old, new in zip(member.seeds or seeds, seeds, strict=True)]
            member.episodes, member.reseeds = 0, False
        # The reset ends the cut episode, so its end need not be reported any more. With a mask, the other lanes' ends
        # must still be reported.
        if member.episode is EpisodeState.CUT and "reset_mask" not in settings:
            member.handle(EpisodeEvent.TOLD)
        member.refusal = None
        if member.episode is not EpisodeState.CUT:
            member.error = None
        if member.link is not LinkState.JOINED or member.episode is EpisodeState.CUT:
            # Keep it for the next joined world.
            member.settings = settings
            # The user asks now, so skip the rest of the pause after earlier failures.
            member.retry_at = 0.0
        else:
            try:
                self.pool.begin(member, settings)
            except BaseException:  # KeyboardInterrupt, see `send_steps`
                self.pool.lose_interrupted(member, "its reset was sent")
                raise

    def place(self, member: Member, step: pb.StepResponse, lanes: Sequence[int]) -> None:
        """Store the first observation of a sequence that a message has begun in the slots of a member.

        Args:
            member: The member.
            step: The observations of its environments.
            lanes: The lanes whose state was changed; the others go on.
        """
        self._stepped, self._tells = None, False
        # Like a reset: the end of a cut episode need not be reported any more.
        if member.episode is EpisodeState.CUT:
            member.handle(EpisodeEvent.TOLD)
        renewed = len(lanes) < member.lanes and member.episode in (EpisodeState.RUNNING, EpisodeState.RENEWED)
        member.handle(EpisodeEvent.RENEW if renewed else EpisodeEvent.BEGIN)
        member.settings = member.refusal = member.error = None
        placed = {member.start + lane for lane in lanes}
        self._unbegun = {slot: why for slot, why in self._unbegun.items() if slot not in placed}
        if step.state == pb.RUNNING:
            member.take(member.remote.placed(step))
        else:  # with several agents, each one begins in the new state with its next Step
            member.deadline = time.monotonic() + self.pool.timeout
            member.remote.begin(reset=False)
        self.pool.started = True

    def begin_step(self, actions: Any) -> None:
        """Check and send the Steps."""
        # If slots can move, an episode may begin at another server, so it cannot begin in the same request.
        self._in_step, self.begins_in_step = self.begins_in_step and not self.pool.moves, False
        if not self.pool.started:
            raise ResetNeededError("expected reset() before the first step(), and after one that was interrupted")
        self._stepped, self._tells = None, True
        coming = False
        for member in self._members.filling:
            # This happens after `send`, and after an interrupt between two Steps.
            if member.episode in STEPPED:
                raise AlreadyPendingError(
                    "step while answers to send are outstanding; take them by recv first, or reset", "recv"
                )
            coming = coming or member.episode in _COMING
        # Checks every action before anything is sent: a wrong action changes nothing.
        columns = self._action_layout.split(actions, len(self._members.at))
        # Usually nothing is outstanding, and polling the sockets would cost each step a system call.
        if coming or time.monotonic() - self.pool.polled_at > 1.0:
            self.pool.drain()
        acted: Collection[Member] = ()
        if self.pacer is not None:
            # Send the actions at once. `pacer` then waits for the end of the frame, so that the observation is new.
            acted = self._act(columns)
            self.pacer()
            self.pool.drain()
        self.send_steps(self._members.filling, None, columns, acted)

    def send_steps(
        self, members: list[Member], positions: list[int] | None, columns: list[Any], acted: Collection[Member] = ()
    ) -> None:
        """Send the Steps of members. Members whose episodes have ended begin the next ones.

        Args:
            members: The members.
            positions: The first row of each member's actions in `columns`; None: its first slot.
            columns: The actions.
            acted: Members whose actions were sent already. Their Steps carry no action, and request only the results.
        """
        now, pool, slot_members = time.monotonic(), self.pool, self._members
        running: list[tuple[Member, int]] = []
        ended: list[Member] = []
        for index, member in enumerate(members):
            if member.episode is EpisodeState.RUNNING:
                running.append((member, member.start if positions is None else positions[index]))
            elif member.episode is EpisodeState.ENDED:
                ended.append(member)
        # Write all requests before anything is sent or changed: a message that is too large raises here.
        written = self._write_steps(running, columns) if len(running) > 1 else [None] * len(running)
        requests: list[bytes] = []
        for (member, position), request in zip(running, written, strict=True):
            if request is None:
                writer = member.remote.writer
                request = writer.first_step if member in acted else writer.write_columns(columns, position)
            requests.append(request)
        if len(slot_members.filling) < len(slot_members.at):  # there are lanes
            for member, _ in running:
                if not member.single:
                    member.remote.set_autoreset(same_step=self._in_step)
        deadline = now + min(pool.timeout, pool.step_timeout or pool.timeout)
        # Remotes with the same address share a socket: collect their requests, and send them in one piece.
        with pool.corked() if slot_members.shared else nullcontext():
            try:
                for member in ended:
                    # The Step after the end begins the next episode (D-9), without a Reset.
                    pool.begin(member, None, reset=False)
                for (member, _), request in zip(running, requests, strict=True):
                    member.step(request, deadline)
            except BaseException:  # after KeyboardInterrupt calls would wait for an unsent Step until the timeout
                pool.lose_interrupted(member, "its action was sent")
                raise
        # Other members may be due for a retry or a move.
        if len(running) + len(ended) < len(slot_members.filling) or pool.has_errors or now >= self._policy.look_at:
            pool.check_deadlines(now)

    def _write_steps(self, plan: list[tuple[Member, int]], columns: list[Any]) -> list[bytes | None]:
        """Write the Steps of single environments with equal forms at once; None: write this Step separately."""
        writers = [member.remote.writer for member, _ in plan]
        forms = [writer.form for writer in writers]
        found: list[bytes | None] = [None] * len(plan)
        for form in set(forms) - {None}:
            places = [place for place, other in enumerate(forms) if other == form]
            if len(places) > 1:
                requests = writers[places[0]].write_steps(columns, [plan[place][1] for place in places])
                for place, request in zip(places, requests or (), strict=False):
                    found[place] = request
        return found

    def _act(self, columns: list[Any]) -> Collection[Member]:
        """Send actions to real-time worlds ahead of the Steps that request the results; return these members."""
        running = (member for member in self._members.filling if member.episode is EpisodeState.RUNNING)
        members = [member for member in running if member.remote.realtime is not None]
        # Write all requests before sending the first one, which also checks their sizes.
        plan = [(member.start, member.remote) for member in members]
        requests = [remote.writer.write_columns(columns, start) for start, remote in plan]
        for (_, remote), request in zip(plan, requests, strict=True):
            remote.act(request)
        return set(members)

    def finish_step(self) -> Results:
        """Wait for every stepped slot; if no slot has an observation, wait a moment for one."""
        members = self._members.filling
        first = 0

        def answered() -> bool:
            nonlocal first
            while first < len(members) and members[first].episode is not EpisodeState.STEPPING:
                first += 1  # members that are not stepping now do not take part in this step
            return first == len(members)

        # Prepare the results while the servers step.
        results = self._new_results()
        # Late slots are lost at their deadlines, which a person's pace extends by a second at most.
        self.pool.gather(answered, time.monotonic() + self.pool.timeout + 2.0)
        # Otherwise a loop over a lost or resetting fleet would step thousands of times per second, without results.
        if not any(member.answer is not None for member in members):
            self.pool.gather(lambda: any(member.answer is not None for member in members), time.monotonic() + _PACE)
        results.hand_out()
        return results

    def _begin_next(self, ended: Array, told: bool) -> None:
        """Begin the next episodes of slots that ended, in the same step.

        Args:
            ended: The slots that ended, bools `(num_envs,)`.
            told: True if an answer contains first observations of lanes; a world without ended lanes must not send any.
        """
        for member in self._members.filling:
            chosen = ended[member.slots]
            lanes = chosen.nonzero()[0].tolist()
            if not (lanes or told) or member.episode not in (EpisodeState.RUNNING, EpisodeState.ENDED):
                continue  # a cut slot begins its next episode once its remote is back
            if member.single:
                if lanes:
                    self.pool.begin(member, None, reset=False)
            elif not self.pool.renew_in_step(member, chosen, lanes) and lanes:
                settings = reset_settings(reset_mask=None if len(lanes) == len(chosen) else chosen)
                if member.remote.realtime is not None:
                    settings["restart"] = pack_tensor(False)  # in real time the next episodes run already
                self.pool.begin(member, settings)

    def wait_for_all(self, timeout: float, *, same_step: bool = False, on_lost: OnLost = "wait") -> Results:
        """Wait until every slot has an observation. A slot that was cut in this step repeats its last one.

        Args:
            timeout: Seconds.
            same_step: True: slots whose episodes ended begin the next ones now, and we wait for their first
                observations, which are in `Results.first`.
            on_lost: What to do with a slot whose remote was lost: `wait` for it, `raise`, or `continue` with its last
                observation.

        Raises:
            RemoteTimeoutError: Some slots have no observation after `timeout` seconds; the error names their URLs.
                Received answers are kept.
            EnvironmentFailedError: A remote environment fails in every attempt to reset it.
            RemoteError: With `raise`, a remote without a ready spare was lost.
        """
        results = self._stepped
        if results is None:
            # Prepare the results while the servers step.
            results = self._new_results()
            gather_all(self.pool, timeout, on_lost)
            results.hand_out()
            if not results.complete:
                results.fill_last()
            if self._unbegun:
                # The server has begun these lanes' next episodes in this step. There is no transition from the last
                # observation of one episode to the first one of another, so this row is reported as a truncated
                # episode.
                results.cut_unbegun(self._unbegun)
                self._unbegun = {}
            # For worlds that do not reset in the ending step, SAME_STEP takes two round trips: the Step, then a begin
            # or a Reset of the slots that ended (in real time only the entry into the running episode). Gymnasium
            # returns both at once: the new episode's observation with the reward and flags of the old one, whose last
            # observation and info are in `final_obs` and `final_info`. So we keep the results of the step, and add
            # the first results of the new episodes. `same_step` is not set for a world that is SAME_STEP by itself,
            # because its answer contains both.
            if not same_step:
                return results
            ended = results.ended
            if results.begin_told(ended) if results.tells_begun else not ended.any():
                return results
            self._begin_next(ended, results.tells_begun)
            self._stepped = results  # after a timeout in the second round trip, the next call continues there
        self.pool.handing_out = False
        # If lanes have begun in the step itself, there is nothing to wait for, and polling would cost system calls.
        if self.pool.has_errors or any(member.episode not in SETTLED for member in self._members.filling):
            gather_all(self.pool, timeout, on_lost)
        begun = self.take_results(before=results)
        self._stepped = None
        # A world may be lost in the second round trip, after its answer to the Step. Report the loss in this step too:
        # otherwise the slot would seem to go on. A slot that terminated in the step stays terminated.
        if not begun.complete:
            begun.fill_last()
            results.batch.truncations |= begun.batch.truncations & ~results.batch.terminations
        results.begin(begun)
        self._unbegun = begun.failures
        return results

    def finish_reset(self) -> Results:
        """Return the results since `begin_reset`, without waiting."""
        self.pool.drain()
        return self.take_results()

    def take_results(self, before: Results | None = None) -> Results:
        """Hand out the answers that have arrived.

        Args:
            before: The results of a step that ended episodes, if these are the first results of the next ones.
        """
        results = self._new_results(before=before)
        results.hand_out()
        return results

    def _new_results(self, before: Results | None = None) -> Results:
        """Return empty results of all slots; for `before` see `take_results`."""
        return Results(self.pool, self._observation_layout, self._reward_space, tells=self._tells, before=before)

    # send and recv

    def send(self, actions: Any, slots: Any) -> None:
        """Implement `RemoteVectorEnv.send`."""
        self._in_step = False
        if not self.pool.started:
            raise ResetNeededError("expected reset() before the first send(), and after a call that was interrupted")
        order = _checked_slots(slots, len(self._members.at))
        members, positions = self._plan(order)
        columns = self._action_layout.split(actions, len(order))
        self.pool.drain()
        for member in members:
            if member.episode in STEPPED:
                raise AlreadyPendingError(
                    f"an action of {member.title} was sent already, whose answer was not taken; call recv first", "recv"
                )
        self.send_steps(members, positions, columns)  # a slot without an episode begins its next one by itself

    def _plan(self, order: list[int]) -> tuple[list[Member], list[int]]:
        """Return the members of the slots in `order`, and the position of each member's first slot in `order`."""
        members: list[Member] = []
        positions: list[int] = []
        member_at, position = self._members.at, 0
        while position < len(order):
            member = member_at[order[position]]
            stop = position + member.lanes
            if member.lanes > 1 and order[position:stop] != list(range(member.start, member.start + member.lanes)):
                raise SettingError(
                    f"{member.title} are lanes of one world, which one message steps: name all of them, in order and "
                    "side by side, as recv returns them; or give make_vec_remote lanes=False"
                )
            members.append(member)
            positions.append(position)
            position = stop
        return members, positions

    def recv(self, at_least: int) -> Received:
        """Implement `RemoteVectorEnv.recv`."""
        if not self.pool.started:
            raise ResetNeededError("expected reset() before recv(), and after one that was interrupted")
        if not isinstance(at_least, (int, np.integer)) or isinstance(at_least, bool) or at_least < 1:
            raise SettingError(f"expected at_least to be a positive number of slots, got {at_least!r}")
        pool, filling = self.pool, self._members.filling
        pool.drain()
        coming = sum(member.lanes for member in filling if member.episode in _COMING)
        if coming < at_least:
            raise SettingError(
                f"expected at_least to be at most the {coming} slots that an answer is coming for, got {at_least}; "
                "call send for more slots first"
            )

        def ready() -> int:
            return sum(member.lanes for member in filling if member.episode in _HERE)

        def enough() -> bool:
            if pool.has_errors:
                pool.raise_permanent_error()
            return ready() >= at_least

        # One second longer than a step: a late slot is cut first, and its end counts as an answer.
        if not pool.gather(enough, time.monotonic() + pool.timeout + 1.0):
            raise RemoteTimeoutError(
                ", ".join(dict.fromkeys(member.remote.url for member in filling if member.episode not in SETTLED)),
                f"{ready()} slots answered within {pool.timeout:g} s, where recv(at_least={at_least}) waits for more",
            )
        members = [member for member in filling if member.episode in _HERE]
        pool.started = False  # an interrupt would lose some of the results, and then a reset is needed
        results = Results(pool, self._observation_layout, self._reward_space, members)
        results.hand_out()
        # A cut slot has no new observation, and its row in the batch is uninitialised.
        if not results.complete:
            results.fill_last()
        slots = np.concatenate([np.arange(member.start, member.start + member.lanes) for member in members])
        batch, infos = results.batch, results.merged_infos()
        received = slots, results.batched(), batch.rewards, batch.terminations, batch.truncations, infos
        pool.started = True
        return received


def _checked_slots(slots: Any, num_envs: int) -> list[int]:
    array = np.arange(num_envs) if slots is None else np.asarray(slots)
    if array.ndim != 1 or array.dtype.kind not in "iu" or not array.size:
        raise SettingError(f"expected slots to be a list of slot numbers, with at least one, got {slots!r:.80}")
    order: list[int] = array.tolist()
    if len(set(order)) != len(order) or min(order) < 0 or max(order) >= num_envs:
        raise SettingError(f"expected different slots from 0 to {num_envs - 1}, got {order}")
    return order
