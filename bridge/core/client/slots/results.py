"""The results of one `reset` or `step`, in the forms that callers need: rows, batches, infos and slot states."""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector import VectorEnv

from bridge.core.client.slots.members import SlotMembers
from bridge.core.client.slots.slot import EpisodeEvent, EpisodeState, Member, SlotState
from bridge.core.client.slots.vector_pool import TRUNCATED, VectorPool
from bridge.core.client.world.session_states import StepAnswered
from bridge.core.client.world.steps import Batch, BegunAnswer, StepReader
from bridge.core.encoding import values
from bridge.core.encoding.infos import ACTION, as_rows, batch_interventions, joins, lane_info, merge_lanes
from bridge.core.encoding.spaces import Column, Layout
from bridge.core.encoding.step_codec import StepAnswer
from bridge.core.encoding.tensors import Array
from bridge.errors import UNREADABLE, Code, ConnectionLostError, EnvironmentFailedError, RemoteError, TensorError

__all__ = ["InfoJoiner", "Results", "slot_states"]

# A single answer of at most this many bytes is read faster as a stack of one.
_SMALL = 1024
# Faster than a Python loop; used in each step of many slots.
_INFO = operator.attrgetter("info")


class InfoJoiner(VectorEnv[Any, Any, Any]):
    """Joins infos of slots into one dict of arrays with `_key` masks, by Gymnasium's own rules.

    Args:
        num_envs: The number of slots.
    """

    closed = True  # derives from VectorEnv only for `_add_info`, and has nothing to close

    def __init__(self, num_envs: int) -> None:
        self.infos: dict[str, Any] = {}
        self.num_envs = num_envs

    def add(self, info: Mapping[str, Any], slot: int) -> None:
        """Add the info of one slot. A key with values of several types becomes an array of objects."""
        for key, value in info.items():
            try:
                self.infos = self._add_info(self.infos, {key: value}, slot)
            # One server's info must not spoil the others': keep values that do not fit an array as objects.
            except UNREADABLE:
                known = {name: self.infos[name] for name in (key, f"_{key}") if name in self.infos}
                # Slots without the key hold None, as in Gymnasium's arrays of objects.
                self.infos[key] = np.full(self.num_envs, None)
                for other in range(self.num_envs):
                    self.infos[key][other] = value if other == slot else lane_info(known, other).get(key)
                self.infos.setdefault(f"_{key}", np.zeros(self.num_envs, np.bool_))[slot] = True


class Results:
    """The answers of some members of a pool, side by side, after `hand_out`.

    Args:
        pool: The pool.
        layout: The layout of observations.
        reward_space: The reward space of one environment; None: rewards are floats.
        members: The members whose answers are handed out; None: all, so that each row is a slot.
        tells: True if the caller sees the flags. Otherwise the ends of cut episodes stay for later results.
        before: The results of the current step, if these are the first results of the next episodes (SAME_STEP).
    """

    def __init__(
        self,
        pool: VectorPool,
        layout: Layout,
        reward_space: Space[Any] | None,
        members: Sequence[Member] | None = None,
        *,
        tells: bool = True,
        before: Results | None = None,
    ) -> None:
        self._places: list[tuple[Member, slice]] = []
        size = 0
        self._members = pool.members
        for member in self._members.filling if members is None else members:
            # Usually all members are handed out; then rows are slots.
            self._places.append((member, member.slots if members is None else slice(size, size + member.lanes)))
            size += member.lanes
        self.size = size
        """The number of rows."""
        self.rows_alone = before is not None and all(
            member.answer is None or isinstance(member.answer.message, BegunAnswer) for member, _ in self._places
        )
        """True if the only new data are first observations of episodes; the other rows are those of `before`."""
        columns = None
        if before is not None and self.rows_alone:
            columns = [column.copy() for column in before.batch.columns]
        self.batch: Batch = Batch.empty(layout, size, reward_space, columns)
        """Columns and flags of all rows. Rows that are not `valid` are undefined in the columns."""
        self.valid: Array = np.zeros(size, np.bool_)
        """Which rows have an observation, `(size,)`."""
        self.errors: dict[int, RemoteError] = {}
        """Why an episode was cut off, by row."""
        self.failures: dict[int, EnvironmentFailedError] = {}
        """The failures of single lanes' environments, which end only those lanes' episodes, by row."""
        self._unbegun: dict[int, EnvironmentFailedError] = {}
        """Those of `failures` that came with the previous step."""
        self.common: dict[str, Any] = {}
        """Infos that do not come from the remotes: arrays `(size,)`."""
        self.moved: Array | None = None
        """The rows that were truncated because their world left a draining server; None: no rows."""
        self.first: list[Column] | None = None
        """The columns of all rows, with the first observations of episodes that began in this step (SAME_STEP); None:
        no episode did."""
        self._begun: Results | None = None
        """The first results of these episodes; None: there are only observations."""
        self.tells_begun = False
        """True if an answer contains both the end of lanes' episodes and the begin of the next ones."""
        self.complete = False
        """True if all rows have an observation."""
        self.plain = False
        """True if all rows are running single environments in lock step, with an observation and without an info."""
        self._infos: list[tuple[Member, int, Any]] = []  # the member, its first row and its info as received
        self._pool, self._layout, self._tells = pool, layout, tells
        self._any_info = False

    def hand_out(self) -> None:
        """Take the answers that have arrived. Call this once."""
        pool, batch, valid, infos = self._pool, self.batch, self.valid, self._infos
        stacked = {} if self.rows_alone else self._stack_answers()
        pool.handing_out = complete = True
        if len(stacked) == len(self._places) and set(map(_INFO, stacked.values())) == {values.EMPTY_DICT}:
            for member, _ in self._places:
                member.handed()
            valid[:] = self.complete = self.plain = True
            if pool.notes:
                pool.tell_notes()
            return
        for member, rows in self._places:
            answer, start = member.answer, rows.start
            # Its remote is away or not ready, or there was no request.
            if answer is None:
                complete = False
                if member.error is not None:
                    self._cut_off(member, rows, member.error)
                continue
            stepped, mine = member.episode is EpisodeState.ANSWERED, stacked.get(start)
            if mine is not None and mine.info == values.EMPTY_DICT:  # the usual case
                member.handed()
                valid[start] = True
                continue
            try:
                if mine is not None:
                    info = answer.reader.read_info(mine)
                elif self.rows_alone and isinstance(answer.message, BegunAnswer):
                    info = answer.reader.read_begun(answer.message.begun, batch, start)
                else:
                    info = answer.reader.read_into(answer.message, batch, start, member.remote.now())
                if answer.reader.begun is not None:
                    answer.reader.check_begun(stepped=stepped)
                    self.tells_begun = True
            except RemoteError as error:
                # Lose only this remote, whose answer does not fit its space. Hand out the other answers.
                pool.lose(member, member.remote.give_up(error))
                self._cut_off(member, rows, error)
                complete = False
                continue
            member.handed()
            self._any_info = self._any_info or bool(info)
            resetting = member.remote.resetting
            if resetting is None:
                valid[rows] = True
            else:  # in real time the server answers as soon as one lane has an observation
                valid[rows] = ~resetting
                complete = complete and bool(valid[rows].all())
            infos.append((member, start, info))
            if answer.reader.failed:
                self._note_failures(member, start, info, answer.reader.failed)
            if stepped and not member.single and pool.lanes_leave:
                self._leave(member, rows)
        if pool.notes:
            pool.tell_notes()
        self.complete = complete

    def _stack_answers(self) -> dict[int, StepAnswer]:
        """Write answers with equal templates into the batch at once, except their infos; return them by row."""
        # Done after all answers are here. Writing early answers while waiting cost steps of 64 CartPoles 50 µs more
        # processor time, and was not faster.
        alike: dict[Any, tuple[StepReader, list[int], list[StepAnswer]]] = {}
        for column in self.batch.columns:
            # Text, graph and sequence spaces have lists of rows, which cannot be written at once.
            if not isinstance(column, np.ndarray):
                return {}
        for member, rows in self._places:
            answer = member.answer
            if answer is not None and member.single and type(message := answer.message) is StepAnswer:
                # Worlds with equal UIDs, types and shapes of their tensors share one template.
                if message.template not in alike:
                    alike[message.template] = answer.reader, [], []
                _, places, answers = alike[message.template]
                places.append(rows.start)
                answers.append(message)
        done: dict[int, StepAnswer] = {}
        for template, (reader, places, answers) in alike.items():
            if len(places) == 1 and template.size > _SMALL:
                continue  # a large single answer is faster without the stack, which copies it once more
            try:
                reader.read_rows(answers, self.batch, slice(None) if len(places) == self.size else places)
            except TensorError:
                continue  # read them one by one, so that only the remotes at fault are lost
            done.update(zip(places, answers, strict=True))
        return done

    def _leave(self, member: Member, rows: slice) -> None:
        """Move a stepped world of lanes away from a draining server, if a replacement is ready.

        The move truncates the episodes of its lanes.
        """
        before, record = member.remote, member.record
        self._pool.move_lanes(member)
        # No replacement is ready yet: a later step moves it.
        if member.remote is before:
            return
        cut: Array = ~self.ended[rows]
        if before.resetting is not None:
            cut &= ~before.resetting  # these lanes are not in an episode
        self.batch.truncations[rows] |= cut
        record.episodes_moved += int(np.count_nonzero(cut))
        if self.moved is None:
            self.moved = np.zeros(self.size, np.bool_)
        self.moved[rows] = cut

    def _note_failures(self, member: Member, start: int, info: Any, lanes: Sequence[int]) -> None:
        """Store why lanes failed. The server has truncated their episodes."""
        for lane in lanes:
            told = lane_info(info, lane)
            place = info[lane] if isinstance(info, list) else info
            # In SAME_STEP mode, `final_info` belongs to the ended episode, the rest to the next one.
            if "error" not in told and isinstance(place.get("final_info"), dict):
                told, place = told["final_info"], place["final_info"]
            # Wrappers around the served lanes may have removed the error.
            reason = str(told.get("error", "the environment failed"))
            self.failures[start + lane] = error = EnvironmentFailedError(member.remote.url, reason, Code.INTERNAL)
            if "error" in told:  # add the server's URL, like for a single environment
                holder, key = (place, "error") if isinstance(info, list) else (place["error"], lane)
                holder[key] = str(error)
            if self._tells:
                member.record.episodes_lost += 1
                first = reason.partition("\n")[0]
                self._pool.note(f"{TRUNCATED}{first}", member.start + lane)

    def begin(self, begun: Results) -> None:
        """Add the first results of episodes that were asked for in this step."""
        self._begun, self.first = begun, begun.batch.columns
        if not begun.rows_alone:
            pairs, ended = zip(self.batch.columns, begun.batch.columns, strict=True), self.ended
            self.first = [_replaced(column, new, ended) for column, new in pairs]

    def begin_told(self, ended: Array) -> bool:
        """Use first observations that came with the ends of the previous episodes, in the same answers.

        Args:
            ended: The rows whose episodes ended, bools `(size,)`.

        Returns:
            True if the answers contain the first observations of all these rows, and nothing else. If False, nothing
            has changed, and the caller has to ask for the rest or to read more.
        """
        first: list[Column] = [column.copy() for column in self.batch.columns]
        told: list[tuple[Member, StepAnswered, bool]] = []
        for member, rows in self._places:
            lanes, answer = ended[rows].nonzero()[0].tolist(), member.last
            begun = None if answer is None else answer.reader.begun
            if begun is None and not lanes:
                continue
            if answer is None or isinstance(answer.message, BegunAnswer) or member.episode is not EpisodeState.RUNNING:
                return False
            # A wrong answer is read again later, by code that raises the error.
            if begun is None or not lanes or begun.lanes != lanes or begun.code or begun.info:
                return False
            try:
                answer.reader.write_rows(begun, first, rows.start)
            except UNREADABLE:
                return False
            renewed = StepAnswered(BegunAnswer(answer.message, begun), answer.reader)
            told.append((member, renewed, len(lanes) == member.lanes))
        for member, renewed, together in told:
            member.renewed(renewed, together=together)
        self.first = first
        return True

    def cut_unbegun(self, failures: dict[int, EnvironmentFailedError]) -> None:
        """Truncate rows whose lanes failed to begin their episodes in the previous step."""
        self.batch.truncations[list(failures)] = True
        # If a lane failed again, the new reason counts.
        self._unbegun, self.failures = failures, {**failures, **self.failures}

    def _cut_off(self, member: Member, rows: slice, error: RemoteError) -> None:
        """End the episode of a member whose remote failed: truncated once, then None until the remote is back."""
        self.errors.update(dict.fromkeys(range(rows.start, rows.stop), error))
        # Truncate once. From then on the row is None, with the reason, until the world is back.
        if member.episode is EpisodeState.CUT and self._tells:
            member.handle(EpisodeEvent.TOLD)
            member.record.episodes_lost += member.lanes
            self.batch.truncations[rows] = True
            # Inlined `note`: a lost server may have hundreds of slots.
            what = f"{TRUNCATED}{str(error).partition(chr(10))[0]}"
            self._pool.notes.setdefault(what, []).extend(range(member.start, member.start + member.lanes))

    # Forms

    @property
    def ended(self) -> Array:
        """The rows whose episodes ended, bools `(size,)`."""
        return self.batch.terminations | self.batch.truncations

    def merged_infos(self) -> dict[str, Any]:
        """Return the infos in Gymnasium's form: arrays over the rows with `_key` masks."""
        if self.first is None and not (self._any_info or self.errors) and self.moved is None:
            return self.common.copy()  # the usual case
        infos = {**(self._merged() if self.first is None else self._same_step_infos()), **self.common}
        if self._infos and any(info and _acted_for(info) for *_, info in self._infos):
            space, owns = self._members.world_info().action_space, self.own_infos()
            if self.first is not None:  # interventions before the end belong to `final_info`
                ended = self.ended
                finals = [own if over else {} for own, over in zip(owns, ended, strict=True)]
                if any(ACTION in own for own in finals):
                    batch_interventions(infos["final_info"], finals, space)
                first = self.first_infos(range(self.size))
                owns = [new if over else own for own, new, over in zip(owns, first, ended, strict=True)]
            if any(ACTION in own for own in owns):
                batch_interventions(infos, owns, space)
        if self.moved is not None:
            infos.update(moved=self.moved, _moved=self.moved.copy())
        return infos

    def _merged(self) -> dict[str, Any]:
        # The server has already batched the infos of a single world of lanes.
        if len(self._places) == 1 and self._infos and not self._infos[0][0].single:
            info = self._infos[0][2]
            if isinstance(info, dict):
                return info
        joiner = InfoJoiner(self.size)
        for slot, error in self.errors.items():
            joiner.add({"error": str(error)}, slot)
        times: list[tuple[int, Any]] = []
        only_single = all(member.single for member, *_ in self._infos)
        for member, start, info in self._infos:
            if not info:
                continue
            if member.single:
                # Merged below, all slots at once: `_add_info` would be called for each of these numbers.
                realtime = member.remote.realtime
                if only_single and realtime is not None and realtime.told and realtime.told is info.get("latency"):
                    times.append((start, info["latency"]))
                    info = {key: value for key, value in info.items() if key != "latency"}
                joiner.add(info, start)
                continue
            rows = info if isinstance(info, list) else as_rows(info, member.lanes)
            if isinstance(rows, dict) and joins(joiner.infos, rows):
                merge_lanes(joiner.infos, rows, start, member.lanes, self.size)
            else:
                for lane in range(member.lanes):
                    joiner.add(lane_info(rows, lane), start + lane)
        if times:
            from bridge.core.client.realtime.reader import merge_latency  # only real-time worlds need it

            merge_latency(joiner.infos, times, self.size)
        return joiner.infos

    @property
    def has_infos(self) -> bool:
        """True if a row may have a non-empty info."""
        return self._any_info or bool(self.errors or self._unbegun) or self.moved is not None

    def own_infos(self, rows: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Return each row's own info.

        Args:
            rows: The rows, in this order; None: all.
        """
        if rows is not None and not self.has_infos:
            return [{} for _ in rows]  # the usual case
        own = self._own_infos()
        return own if rows is None else [own[row] for row in rows]

    def _own_infos(self) -> list[dict[str, Any]]:
        own: list[dict[str, Any]] = [{} for _ in range(self.size)]
        for member, start, info in self._infos if self._any_info else ():
            rows = info if member.single or isinstance(info, list) else as_rows(info, member.lanes)
            for lane in range(member.lanes):
                # A copy, because keys are added below.
                own[start + lane] = dict(rows) if member.single else lane_info(rows, lane)
        for slot, error in self.errors.items():
            own[slot]["error"] = str(error)
        for slot, error in self._unbegun.items():
            own[slot].setdefault("error", str(error))
        for slot in () if self.moved is None else np.flatnonzero(self.moved).tolist():
            own[slot]["moved"] = True
        return own

    def first_infos(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return the first info of the episode that began in this step, for each of these rows."""
        return [{} for _ in rows] if self._begun is None else self._begun.own_infos(rows)

    def _same_step_infos(self) -> dict[str, Any]:
        """Return the infos of a step in which slots that ended have begun their next episodes (SAME_STEP)."""
        joiner = InfoJoiner(self.size)
        last, first, ended = self.own_infos(), self.first_infos(range(self.size)), self.ended
        for slot in range(self.size):
            if ended[slot]:
                # The caller's observation is the new episode's, so the old one's goes into the info.
                joiner.add({"final_obs": self.row(slot), "final_info": last[slot]}, slot)
            # In real time another slot may end while these are reset. Only the second round trip's answer has the
            # record of that episode, so add it here.
            elif "episodes" in first[slot]:
                last[slot]["episodes"] = [*last[slot].get("episodes", ()), *first[slot]["episodes"]]
            joiner.add(first[slot] if ended[slot] else last[slot], slot)
        return joiner.infos

    def fill_last(self) -> None:
        """Fill rows without a new observation, which were cut or not asked, with their last one.

        Raises:
            ConnectionLostError: A slot never had an observation.
        """
        for member, rows in self._places:
            if self.valid[rows.start]:
                continue
            last = member.last
            if last is None:
                raise ConnectionLostError(member.remote.url, f"it went before its first observation: {member.error}")
            # Write only the observation: reward, flags and info were handed out with the last answer.
            last.reader.write_again(last.message, self.batch, rows.start)

    def row(self, slot: int) -> Any:
        """Return one row's observation."""
        return self._layout.row(self.batch.columns, slot)

    def rows_of(self, slots: list[int]) -> list[Any]:
        """Return copies of the observations of some rows."""
        return self._layout.rows_of(self.batch.columns, slots)

    def rows(self) -> tuple[Any, ...]:
        """Return each row's observation, or None. Small ones may be views of the columns."""
        if self.complete:
            return self._layout.rows(self.batch.columns, self.size)
        return tuple(self.row(slot) if has else None for slot, has in enumerate(self.valid.tolist()))

    def batched(self) -> Any:
        """Return the batched observations of all rows; for an episode that began in this step, its first one."""
        return self._layout.batch(self.batch.columns if self.first is None else self.first)

    def as_universe(self) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Return the results of a `RemoteVectorEnv.step`, with a tuple of observations, None for slots without one."""
        rows, batch, members = self.rows(), self.batch, self._members
        infos = self.merged_infos()
        infos["n"] = tuple(self.own_infos())
        if self.plain:  # the usual case
            infos["slot_state"] = np.full(self.size, SlotState.RUNNING, np.int64)
            return rows, batch.rewards, batch.terminations, batch.truncations, infos
        infos["slot_state"] = slot_states(members)
        now = time.monotonic()
        away = {member: seconds for member in members.filling if (seconds := member.seconds_away(now)) is not None}
        if away:
            infos["seconds_away"] = np.zeros(len(members.at))
            for member, seconds in away.items():
                infos["seconds_away"][member.slots] = seconds
        return rows, batch.rewards, batch.terminations, batch.truncations, infos


def _acted_for(info: Any) -> bool:
    """True if an info, or an info of a lane, contains an intervention."""
    return any(ACTION in own for own in info) if isinstance(info, list) else ACTION in info


def _replaced(column: Column, new: Column, slots: Array) -> Column:
    """Return a copy of a column, with the items of another column in some slots."""
    if isinstance(column, np.ndarray):
        mixed: Array = column.copy()
        mixed[slots] = np.asarray(new)[slots]
        return mixed
    return [new[slot] if slots[slot] else item for slot, item in enumerate(column)]


def slot_states(members: SlotMembers) -> Array:
    """Return the state of each slot: an int64 array `(num_envs,)` of `SlotState`."""
    filling = members.filling
    found = [member.state for member in filling]
    states = np.fromiter(found, np.int64, len(found))
    # Only if a world has several lanes.
    if len(filling) < len(members.at):
        states = np.repeat(states, [member.lanes for member in filling])
    for member, state in zip(filling, found, strict=True):
        # In real time a lane of a running world may be between two episodes.
        resetting = member.remote.resetting if state is SlotState.RUNNING else None
        if resetting is not None:
            states[member.slots][resetting] = SlotState.RESETTING
    return states
