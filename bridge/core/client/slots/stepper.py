"""Sends Resets and Steps to the members of a pool, and gathers their answers, or waits until every slot has one."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypeAlias

import numpy as np

from bridge.core.client.slots.resets import plan_resets, reset_settings
from bridge.core.client.slots.results import Results
from bridge.core.client.slots.slot import SETTLED, STEPPED, EpisodeEvent, EpisodeState, LinkState, Member
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
# Seconds between two reports.
_PERIOD = 5.0
_MOST_LINES = 5

OnLost: TypeAlias = Literal["wait", "raise", "continue"]
"""Decides what becomes of slots whose remote was lost: wait for them, raise, or go on with their last observations."""


def gather_all(pool: VectorPool, timeout: float, on_lost: OnLost) -> None:
    """Wait until every slot has an observation, or is not waited for by `on_lost`; raises as `Stepper.wait_for_all`."""
    slot_members = pool.members
    members = slot_members.filling
    first = 0
    began = since = time.monotonic()
    late = members[0]  # who is waited for, and `since` when, but for the time that is counted already
    tell_at = began + _PERIOD

    def tolerated(member: Member) -> bool:
        """Tell whether nobody waits for a slot that has no observation; raise where its loss is to be raised."""
        # A slot that moves is not `away`, and one that connects again is offline no more: neither raises.
        gone = on_lost == "raise" and member.away and member.link is LinkState.OFFLINE
        if gone and member.error is not None and not pool.has_spare(member):
            raise member.error
        # If every slot is away, going on would give nothing but repeated observations: then it waits.
        return on_lost == "continue" and member.away and not all(other.away for other in members)

    def enough() -> bool:
        nonlocal first, late, since, tell_at
        # The flag, because this runs after each answer: a look at every slot would cost a step of n slots n² looks.
        if pool.has_errors:
            pool.raise_permanent_error()
            first = 0
        while first < len(members) and (
            members[first].episode in SETTLED or (on_lost != "wait" and tolerated(members[first]))
        ):
            first += 1
        # Only what a lost slot costs is counted, not the time that environments take. That begins with the silence by
        # which the loss showed, also where nobody waits any longer: its end is told, or a spare has taken over.
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
    """Log what is waited for, in a few lines."""
    lines = _describe([member for member in members if member.episode not in SETTLED])
    # Of a fleet that is gone nobody reads a line for each of thousands of servers.
    for line in lines[:_MOST_LINES]:
        _log.warning("waiting %.0f s of at most %g s for %s", waited, timeout, line)
    if len(lines) > _MOST_LINES:
        _log.warning("and %d further lines like these, which are left out", len(lines) - _MOST_LINES)


def _describe(late: Sequence[Member]) -> list[str]:
    """Say which slots members fill, where they are, and why, in a line for all that are late for the same reason."""
    titles: dict[str, list[str]] = {}
    for member in late:
        reason = f": {member.error.reason}" if member.error is not None else ""
        why = f"({member.remote.url}), {member.state.name.lower()}{reason.partition(chr(10))[0]}"
        titles.setdefault(why, []).append(member.title)
    return [f"{own[0]}{f' and {len(own) - 1} more' if own[1:] else ''} {why}" for why, own in titles.items()]


# There is something to hand out: an answer, or the end of an episode that was cut; or it is coming.
_HERE = frozenset({EpisodeState.BEGUN, EpisodeState.ANSWERED, EpisodeState.RENEWED, EpisodeState.CUT})
_COMING = frozenset(EpisodeState) - {EpisodeState.RUNNING, EpisodeState.ENDED}
# Seconds that `finish_step` waits where no slot has an observation: a loop over it does not spin.
_PACE = 0.02
Received = tuple[Array, Any, Array, Array, Array, dict[str, Any]]
"""Slots, observations, rewards, terminations, truncations and infos."""


class Stepper:
    """Steps the slots of a pool.

    Args:
        pool: What waits for the remotes.
        pacer: The first value of the attribute.
    """

    def __init__(self, pool: VectorPool, pacer: Callable[[], None] | None = None) -> None:
        self.pool = pool
        self._members, self._policy = pool.members, pool.policy
        self.pacer = pacer
        """Called in each step between the sending of actions and the request for what came of them."""
        world_info = self._members.world_info()
        self._observation_layout = Layout(world_info.observation_space, "observation")
        self._action_layout = Layout(world_info.action_space, "action")
        self._reward_space = world_info.reward_space
        self._tells = True
        """False in a reset, which returns no flags: the ends of episodes that were cut are kept for the next step."""
        self.begins_in_step = False
        """Set before a step: lanes that it ends are to begin their next episodes in the same request, as far as their
        server knows how. It holds for that step alone."""
        self._in_step = False
        self._stepped: Results | None = None
        """The results of a step whose slots that ended begin their next episodes (SAME_STEP); None: there are none."""
        self._unbegun: dict[int, EnvironmentFailedError] = {}
        """Why lanes could not begin their next episodes in the step that ended the last ones (SAME_STEP), by slot."""

    def begin_reset(
        self,
        seed: int | Sequence[int | None] | None,
        options: Mapping[str, Any] | None,
        slot_options: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Check and send the Resets.

        Args:
            seed: As for `reset`.
            options: As for `reset`; the dict stays as it is.
            slot_options: Further options of each slot's own.

        Raises:
            SettingError: Seeds or options that cannot be sent, or the lanes of one world were given different options.
        """
        self._stepped, self._tells = None, False
        self.pool.drain()
        # All Resets are made before the first is sent: if one cannot be sent, every slot goes on as it was.
        for plan in plan_resets(self._members, seed, options, slot_options, started=self.pool.started):
            self._send_reset(*plan)
        mask = (options or {}).get("reset_mask")
        self._unbegun = {} if mask is None else {slot: why for slot, why in self._unbegun.items() if not mask[slot]}
        self.pool.check_deadlines(time.monotonic())
        self.pool.started = True

    def _send_reset(
        self, member: Member, settings: Mapping[str, pb.Tensor], seeds: Sequence[int | None] | None
    ) -> None:
        """Send a member's Reset, or keep it for the world that is joined next."""
        if seeds is not None:
            member.seeds = [old if new is None else new for old, new in zip(member.seeds or seeds, seeds, strict=True)]
            member.episodes, member.reseeds = 0, False
        # The reset gives that episode up, so its end is no news any more; but lanes outside of the mask have theirs
        # to tell.
        if member.episode is EpisodeState.CUT and "reset_mask" not in settings:
            member.handle(EpisodeEvent.TOLD)
        member.refusal = None
        if member.episode is not EpisodeState.CUT:
            member.error = None
        if member.link is not LinkState.JOINED or member.episode is EpisodeState.CUT:
            # It is kept for the world that is joined next.
            member.settings = settings
            # The user asks now: the pause after earlier failures is over.
            member.retry_at = 0.0
        else:
            try:
                self.pool.begin(member, settings)
            except BaseException:  # KeyboardInterrupt, as in `send_steps`
                self.pool.lose_interrupted(member, "its reset was sent")
                raise

    def place(self, member: Member, step: pb.StepResponse, lanes: Sequence[int]) -> None:
        """Take the first observation of a sequence that a message has begun in the slots of a member.

        Args:
            member: Whose.
            step: What its environments see.
            lanes: Those of its lanes that are in another situation; the others go on.
        """
        self._stepped, self._tells = None, False
        # As by a reset: the end of an episode that was cut is no news any more.
        if member.episode is EpisodeState.CUT:
            member.handle(EpisodeEvent.TOLD)
        renewed = len(lanes) < member.lanes and member.episode in (EpisodeState.RUNNING, EpisodeState.RENEWED)
        member.handle(EpisodeEvent.RENEW if renewed else EpisodeEvent.BEGIN)
        member.settings = member.refusal = member.error = None
        placed = {member.start + lane for lane in lanes}
        self._unbegun = {slot: why for slot, why in self._unbegun.items() if slot not in placed}
        if step.state == pb.RUNNING:
            member.take(member.remote.placed(step))
        else:  # one of several agents, each of which begins there by its next Step
            member.deadline = time.monotonic() + self.pool.timeout
            member.remote.begin(reset=False)
        self.pool.started = True

    def begin_step(self, actions: Any) -> None:
        """Check and send the Steps."""
        # In a directory each new episode may begin at another server, if its own drains.
        self._in_step, self.begins_in_step = self.begins_in_step and not self.pool.moves, False
        if not self.pool.started:
            raise ResetNeededError("expected reset() before the first step(), and after one that was interrupted")
        self._stepped, self._tells = None, True
        coming = False
        for member in self._members.filling:
            # After `send`, and after an interrupt between two Steps.
            if member.episode in STEPPED:
                raise AlreadyPendingError(
                    "step while answers to send are outstanding; take them by recv first, or reset", "recv"
                )
            coming = coming or member.episode in _COMING
        # It checks every action, before anything is sent: one that is wrong changes nothing.
        columns = self._action_layout.split(actions, len(self._members.at))
        # Where nothing is outstanding, as nearly always, a look at the sockets would cost each step a system call.
        if coming or time.monotonic() - self.pool.polled_at > 1.0:
            self.pool.drain()
        acted: Collection[Member] = ()
        if self.pacer is not None:
            # The action leaves at once, and `pacer` waits for the frame's end, so that the observation is new.
            acted = self._act(columns)
            self.pacer()
            self.pool.drain()
        self.send_steps(self._members.filling, None, columns, acted)

    def send_steps(
        self, members: list[Member], positions: list[int] | None, columns: list[Any], acted: Collection[Member] = ()
    ) -> None:
        """Send the Steps of members; finished ones begin anew.

        Args:
            members: Which.
            positions: The first row of each one's actions in `columns`; None: its first slot.
            columns: The actions.
            acted: Whose actions are sent already: their Steps ask what came of them, and have none.
        """
        now, pool, slot_members = time.monotonic(), self.pool, self._members
        running: list[tuple[Member, int]] = []
        ended: list[Member] = []
        for index, member in enumerate(members):
            if member.episode is EpisodeState.RUNNING:
                running.append((member, member.start if positions is None else positions[index]))
            elif member.episode is EpisodeState.ENDED:
                ended.append(member)
        # All are written before anything is sent or changed: one that is too large to be sent raises here.
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
        # Remotes of one place share a socket: what is sent meanwhile leaves in one piece.
        with pool.corked() if slot_members.shared else nullcontext():
            try:
                for member in ended:
                    # The Step after the end begins the next episode (D-9), without a Reset.
                    pool.begin(member, None, reset=False)
                for (member, _), request in zip(running, requests, strict=True):
                    member.step(request, deadline)
            except BaseException:  # KeyboardInterrupt: a Step that was not sent would be waited for until the timeout
                pool.lose_interrupted(member, "its action was sent")
                raise
        # Whoever neither runs nor has just begun an episode may be due for something.
        if len(running) + len(ended) < len(slot_members.filling) or pool.has_errors or now >= self._policy.look_at:
            pool.check_deadlines(now)

    def _write_steps(self, plan: list[tuple[Member, int]], columns: list[Any]) -> list[bytes | None]:
        """Write the Steps of single environments, those of the same form at once; None: one to be written by itself."""
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
        """Send the actions to real-time worlds ahead of the Step that asks what came of them; return whose."""
        running = (member for member in self._members.filling if member.episode is EpisodeState.RUNNING)
        members = [member for member in running if member.remote.realtime is not None]
        # All are written before one is sent, which checks their sizes.
        plan = [(member.start, member.remote) for member in members]
        requests = [remote.writer.write_columns(columns, start) for start, remote in plan]
        for (_, remote), request in zip(plan, requests, strict=True):
            remote.act(request)
        return set(members)

    def finish_step(self) -> Results:
        """Wait for every slot that was stepped; where none has an observation, wait a moment for one."""
        members = self._members.filling
        first = 0

        def answered() -> bool:
            nonlocal first
            while first < len(members) and members[first].episode is not EpisodeState.STEPPING:
                first += 1  # who is not stepping now will not be in this step
            return first == len(members)

        # Made while the servers step, which costs nobody time.
        results = self._new_results()
        # Late slots are lost at their deadlines, which a person's pace extends by a second at most.
        self.pool.gather(answered, time.monotonic() + self.pool.timeout + 2.0)
        # A loop over a fleet that is lost or resets would otherwise step thousands of times a second, and get nothing.
        if not any(member.answer is not None for member in members):
            self.pool.gather(lambda: any(member.answer is not None for member in members), time.monotonic() + _PACE)
        results.hand_out()
        return results

    def _begin_next(self, ended: Array, told: bool) -> None:
        """Begin the next episode of slots that ended, in this very step.

        Args:
            ended: These slots, bools `(num_envs,)`.
            told: Whether an answer says how lanes began; that of a world in which none ended must not.
        """
        for member in self._members.filling:
            chosen = ended[member.slots]
            lanes = chosen.nonzero()[0].tolist()
            if not (lanes or told) or member.episode not in (EpisodeState.RUNNING, EpisodeState.ENDED):
                continue  # one that was cut begins anew once its remote is back
            if member.single:
                if lanes:
                    self.pool.begin(member, None, reset=False)
            elif not self.pool.renew_in_step(member, chosen, lanes) and lanes:
                settings = reset_settings(reset_mask=None if len(lanes) == len(chosen) else chosen)
                if member.remote.realtime is not None:
                    settings["restart"] = pack_tensor(False)  # their next episodes run already
                self.pool.begin(member, settings)

    def wait_for_all(self, timeout: float, *, same_step: bool = False, on_lost: OnLost = "wait") -> Results:
        """Wait until every slot has an observation; one that was cut off in this very step gives its last one.

        Args:
            timeout: Seconds.
            same_step: Whether slots whose episodes ended begin the next ones now, and are waited for:
                `Results.first` holds what they begin with.
            on_lost: What becomes of a slot whose remote was lost: `wait` for it, `raise`, or `continue` with its last
                observation.

        Raises:
            RemoteTimeoutError: Some have none after `timeout` seconds; it names their URLs. What has come is kept.
            EnvironmentFailedError: A remote environment fails in every attempt to reset it.
            RemoteError: With `raise`, why a remote was lost for which no spare stands by.
        """
        results = self._stepped
        if results is None:
            # Made while the servers step, which costs nobody time.
            results = self._new_results()
            gather_all(self.pool, timeout, on_lost)
            results.hand_out()
            if not results.complete:
                results.fill_last()
            if self._unbegun:
                # The server has begun their next episodes in this step. From the last observation of an episode to
                # the first one of another there is no transition: it is told as an episode of its own, which was cut.
                results.cut_unbegun(self._unbegun)
                self._unbegun = {}
            # For worlds that do not reset in the ending step, SAME_STEP is made of two round trips: the Step, then a
            # begin or a Reset of the slots that ended (in real time only the entry into the episode that runs by then).
            # Gymnasium returns both at once: the new episode's observation, with the reward and flags of the old one's
            # end, whose last observation and info are in `final_obs` and `final_info`. So both results are kept:
            # `results` says how the step went, and takes what the slots that ended begin with. Nobody sets `same_step`
            # for a world that is SAME_STEP by itself: its answer holds both already.
            if not same_step:
                return results
            ended = results.ended
            if results.begin_told(ended) if results.tells_begun else not ended.any():
                return results
            self._begin_next(ended, results.tells_begun)
            self._stepped = results  # a wait that times out in the second trip goes on there when it is called again
        self.pool.handing_out = False
        # Where lanes have begun in the step itself, nothing is waited for: a look at the sockets costs system calls.
        if self.pool.has_errors or any(member.episode not in SETTLED for member in self._members.filling):
            gather_all(self.pool, timeout, on_lost)
        begun = self.take_results(before=results)
        self._stepped = None
        # A world that was lost during the second trip has told its step already. Its loss must be seen in this step
        # too, or the slot would seem to go on; one that terminated in the step stays terminated, and nothing else.
        if not begun.complete:
            begun.fill_last()
            results.batch.truncations |= begun.batch.truncations & ~results.batch.terminations
        results.begin(begun)
        self._unbegun = begun.failures
        return results

    def finish_reset(self) -> Results:
        """Return what has come since `begin_reset`, without a wait."""
        self.pool.drain()
        return self.take_results()

    def take_results(self, before: Results | None = None) -> Results:
        """Hand out what has come; with `before`, the results of a step that ended episodes: what others begin with."""
        results = self._new_results(before=before)
        results.hand_out()
        return results

    def _new_results(self, before: Results | None = None) -> Results:
        """Return results of all slots, which nothing was handed out into yet; `before`: as of `take_results`."""
        return Results(self.pool, self._observation_layout, self._reward_space, tells=self._tells, before=before)

    # send and recv

    def send(self, actions: Any, slots: Any) -> None:
        """Do what `RemoteVectorEnv.send` says."""
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
        self.send_steps(members, positions, columns)  # of a slot that has no episode, the next one begins by itself

    def _plan(self, order: list[int]) -> tuple[list[Member], list[int]]:
        """Return the members that `order` names, and the position in it of each one's first slot."""
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
        """Do what `RemoteVectorEnv.recv` says."""
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

        # A second more than a step has: a late slot is cut first, and its end is one of the answers.
        if not pool.gather(enough, time.monotonic() + pool.timeout + 1.0):
            raise RemoteTimeoutError(
                ", ".join(dict.fromkeys(member.remote.url for member in filling if member.episode not in SETTLED)),
                f"{ready()} slots answered within {pool.timeout:g} s, where recv(at_least={at_least}) waits for more",
            )
        members = [member for member in filling if member.episode in _HERE]
        pool.started = False  # as in `Slots.wait`, for what an interrupt would lose of the results
        results = Results(pool, self._observation_layout, self._reward_space, members)
        results.hand_out()
        # A slot that was cut has no new observation, and its row in the batch is not initialized.
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
