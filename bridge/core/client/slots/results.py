"""The results of one `reset` or `step`, in the forms that callers want: rows, infos, where slots are, what was lost."""

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

# Bytes of an answer up to which reading it as a stack of one is quicker.
_SMALL = 1024
# Quicker than a loop in Python: it is called in each step of many slots.
_INFO = operator.attrgetter("info")


class InfoJoiner(VectorEnv[Any, Any, Any]):
    """Joins infos of slots into one dict of arrays with `_key` masks, by Gymnasium's own rules.

    Args:
        num_envs: The number of slots.
    """

    closed = True  # it is an environment only for the sake of `_add_info`, and has nothing to close

    def __init__(self, num_envs: int) -> None:
        self.infos: dict[str, Any] = {}
        self.num_envs = num_envs

    def add(self, info: Mapping[str, Any], slot: int) -> None:
        """Add what belongs to one slot. A key whose values are of several types becomes an array of objects."""
        for key, value in info.items():
            try:
                self.infos = self._add_info(self.infos, {key: value}, slot)
            # One server's info must not cost the others theirs: what fits into no array is kept as objects.
            except UNREADABLE:
                known = {name: self.infos[name] for name in (key, f"_{key}") if name in self.infos}
                # As in Gymnasium's arrays of objects, where slots without the key hold None.
                self.infos[key] = np.full(self.num_envs, None)
                for other in range(self.num_envs):
                    self.infos[key][other] = value if other == slot else lane_info(known, other).get(key)
                self.infos.setdefault(f"_{key}", np.zeros(self.num_envs, np.bool_))[slot] = True


class Results:
    """Hands out what has come of some members of a pool, side by side, once `hand_out` is called.

    Args:
        pool: Whose answers are taken.
        layout: Of the observations.
        reward_space: Of one environment; None: rewards are floats.
        members: Those that are handed out; None: all. A row is a slot then.
        tells: Whether the caller sees the flags. Else episodes that were cut count as told only by later results.
        before: The results of the step at hand, where these are what slots that ended begin with (SAME_STEP).
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
            # Nearly always all members are handed out, whose slots are their rows.
            self._places.append((member, member.slots if members is None else slice(size, size + member.lanes)))
            size += member.lanes
        self.size = size
        """The number of rows."""
        self.rows_alone = before is not None and all(
            member.answer is None or isinstance(member.answer.message, BegunAnswer) for member, _ in self._places
        )
        """True if no more has come than the observations of slots that began; all others are those of `before`."""
        columns = None
        if before is not None and self.rows_alone:
            columns = [column.copy() for column in before.batch.columns]
        self.batch: Batch = Batch.empty(layout, size, reward_space, columns)
        """Columns and flags of all rows; the columns of rows that are not `valid` hold nothing."""
        self.valid: Array = np.zeros(size, np.bool_)
        """Which rows have an observation, `(size,)`."""
        self.errors: dict[int, RemoteError] = {}
        """Why an episode was cut off, by row."""
        self.failures: dict[int, EnvironmentFailedError] = {}
        """How the environment of a lane failed, which ended that lane's episode alone, by row."""
        self._unbegun: dict[int, EnvironmentFailedError] = {}
        """Those of `failures` which the server told with the step before."""
        self.common: dict[str, Any] = {}
        """Infos of all rows that do not come from the remotes: arrays `(size,)`."""
        self.moved: Array | None = None
        """Which rows were truncated because their world moved off a server that drains; None: none were."""
        self.first: list[Column] | None = None
        """The columns of all rows with the first observations of episodes that began in this very step (SAME_STEP);
        None: none did."""
        self._begun: Results | None = None
        """What these episodes began with beside the observations; None: nothing."""
        self.tells_begun = False
        """True if an answer says how lanes that it ended began their next episodes."""
        self.complete = False
        """True if all rows have an observation."""
        self.plain = False
        """True if all rows are of running single environments in lock step, with an observation and no info."""
        self._infos: list[tuple[Member, int, Any]] = []  # with the first row: as they came, of lanes arrays over them
        self._pool, self._layout, self._tells = pool, layout, tells
        self._any_info = False

    def hand_out(self) -> None:
        """Take the answers that have come; once."""
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
            # Its remote is away or not ready, or it was asked for nothing.
            if answer is None:
                complete = False
                if member.error is not None:
                    self._cut_off(member, rows, member.error)
                continue
            stepped, mine = member.episode is EpisodeState.ANSWERED, stacked.get(start)
            if mine is not None and mine.info == values.EMPTY_DICT:  # as nearly always
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
                # Only this remote sent what its space cannot hold: the others' answers are here, and are handed out.
                pool.lose(member, member.remote.give_up(error))
                self._cut_off(member, rows, error)
                complete = False
                continue
            member.handed()
            self._any_info = self._any_info or bool(info)
            resetting = member.remote.resetting
            if resetting is None:
                valid[rows] = True
            else:  # in real time the server answers for all lanes as soon as one has an observation
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
        """Write all answers of the same template into the batch at once, but for their infos; return them by row."""
        # Once all are here: to write the first ones while the last are on their way took steps of 64 CartPoles 50 µs of
        # processor time more, and they were no quicker.
        alike: dict[Any, tuple[StepReader, list[int], list[StepAnswer]]] = {}
        for column in self.batch.columns:
            # Spaces of text, graphs and sequences have lists of rows, which cannot be written at once.
            if not isinstance(column, np.ndarray):
                return {}
        for member, rows in self._places:
            answer = member.answer
            if answer is not None and member.single and type(message := answer.message) is StepAnswer:
                # Worlds whose tensors have equal UIDs, types and shapes share one template.
                if message.template not in alike:
                    alike[message.template] = answer.reader, [], []
                _, places, answers = alike[message.template]
                places.append(rows.start)
                answers.append(message)
        done: dict[int, StepAnswer] = {}
        for template, (reader, places, answers) in alike.items():
            if len(places) == 1 and template.size > _SMALL:
                continue  # a large one by itself is copied once less
            try:
                reader.read_rows(answers, self.batch, slice(None) if len(places) == self.size else places)
            except TensorError:
                continue  # each by itself, so that only the remotes at fault are lost
            done.update(zip(places, answers, strict=True))
        return done

    def _leave(self, member: Member, rows: slice) -> None:
        """Move a world of lanes that was stepped off a server that drains, if a replacement stands ready.

        The lanes that were in an episode are truncated by it.
        """
        before, record = member.remote, member.record
        self._pool.move_lanes(member)
        # No replacement stands ready yet: a later step moves it.
        if member.remote is before:
            return
        cut: Array = ~self.ended[rows]
        if before.resetting is not None:
            cut &= ~before.resetting  # they are in no episode
        self.batch.truncations[rows] |= cut
        record.episodes_moved += int(np.count_nonzero(cut))
        if self.moved is None:
            self.moved = np.zeros(self.size, np.bool_)
        self.moved[rows] = cut

    def _note_failures(self, member: Member, start: int, info: Any, lanes: Sequence[int]) -> None:
        """Keep why lanes failed; the server has truncated their episodes."""
        for lane in lanes:
            told = lane_info(info, lane)
            place = info[lane] if isinstance(info, list) else info
            # In the mode SAME_STEP the end of the episode is there, and beside it the beginning of the next one.
            if "error" not in told and isinstance(place.get("final_info"), dict):
                told, place = told["final_info"], place["final_info"]
            # Wrappers around the served lanes may have dropped it.
            reason = str(told.get("error", "the environment failed"))
            self.failures[start + lane] = error = EnvironmentFailedError(member.remote.url, reason, Code.INTERNAL)
            if "error" in told:  # as of a single environment: with the server that it is of
                holder, key = (place, "error") if isinstance(info, list) else (place["error"], lane)
                holder[key] = str(error)
            if self._tells:
                member.record.episodes_lost += 1
                first = reason.partition("\n")[0]
                self._pool.note(f"{TRUNCATED}{first}", member.start + lane)

    def begin(self, begun: Results) -> None:
        """Take what episodes began with that were asked for in this very step."""
        self._begun, self.first = begun, begun.batch.columns
        if not begun.rows_alone:
            pairs, ended = zip(self.batch.columns, begun.batch.columns, strict=True), self.ended
            self.first = [_replaced(column, new, ended) for column, new in pairs]

    def begin_told(self, ended: Array) -> bool:
        """Take the first observations of lanes whose next episodes began in the Steps that ended the last ones.

        Args:
            ended: The rows whose episodes ended, bools `(size,)`.

        Returns:
            Whether the answers to these Steps tell of all of them, and no more than observations. Else nothing has
            changed: the rest has to be asked for, or there is more to be read.
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
            # An answer that is wrong is read once more, by what raises the error.
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
        """Truncate rows whose lanes were to begin their episodes in the step before this one, and could not."""
        self.batch.truncations[list(failures)] = True
        # Of one that failed again, the new reason counts.
        self._unbegun, self.failures = failures, {**failures, **self.failures}

    def _cut_off(self, member: Member, rows: slice, error: RemoteError) -> None:
        """End the episode of a member whose remote failed: truncated once, and then None until it is back."""
        self.errors.update(dict.fromkeys(range(rows.start, rows.stop), error))
        # Once: from then on the row is None, with the reason, until the world is back.
        if member.episode is EpisodeState.CUT and self._tells:
            member.handle(EpisodeEvent.TOLD)
            member.record.episodes_lost += member.lanes
            self.batch.truncations[rows] = True
            # Written here: a call for each slot that a server took along would be hundreds.
            what = f"{TRUNCATED}{str(error).partition(chr(10))[0]}"
            self._pool.notes.setdefault(what, []).extend(range(member.start, member.start + member.lanes))

    # Forms

    @property
    def ended(self) -> Array:
        """Which rows' episodes ended, bools `(size,)`."""
        return self.batch.terminations | self.batch.truncations

    def merged_infos(self) -> dict[str, Any]:
        """Return the infos by Gymnasium's rules: arrays over the rows with `_key` masks."""
        if self.first is None and not (self._any_info or self.errors) and self.moved is None:
            return self.common.copy()  # as nearly always
        infos = {**(self._merged() if self.first is None else self._same_step_infos()), **self.common}
        if self._infos and any(info and _acted_for(info) for *_, info in self._infos):
            space, owns = self._members.world_info().action_space, self.own_infos()
            if self.first is not None:  # what was executed in slots that ended is told with their final observation
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
        # The infos of one world of lanes are batched already, by the server's vector environment.
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
                # Below, all of them at once: here each of these numbers would be a call of `_add_info`.
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
            from bridge.core.client.realtime.reader import merge_latency  # there are only such of real-time worlds

            merge_latency(joiner.infos, times, self.size)
        return joiner.infos

    @property
    def has_infos(self) -> bool:
        """True if a row may have an info that is not empty."""
        return self._any_info or bool(self.errors or self._unbegun) or self.moved is not None

    def own_infos(self, rows: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Return each row's own info.

        Args:
            rows: Only those of these rows, in their order; None: all.
        """
        if rows is not None and not self.has_infos:
            return [{} for _ in rows]  # as nearly always
        own = self._own_infos()
        return own if rows is None else [own[row] for row in rows]

    def _own_infos(self) -> list[dict[str, Any]]:
        own: list[dict[str, Any]] = [{} for _ in range(self.size)]
        for member, start, info in self._infos if self._any_info else ():
            rows = info if member.single or isinstance(info, list) else as_rows(info, member.lanes)
            for lane in range(member.lanes):
                # A copy: below it may get keys that are no part of what was received.
                own[start + lane] = dict(rows) if member.single else lane_info(rows, lane)
        for slot, error in self.errors.items():
            own[slot]["error"] = str(error)
        for slot, error in self._unbegun.items():
            own[slot].setdefault("error", str(error))
        for slot in () if self.moved is None else np.flatnonzero(self.moved).tolist():
            own[slot]["moved"] = True
        return own

    def first_infos(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return the info that the episode in each of these rows began with in this very step."""
        return [{} for _ in rows] if self._begun is None else self._begun.own_infos(rows)

    def _same_step_infos(self) -> dict[str, Any]:
        """Return the infos of a step after which slots that ended began their next episodes at once."""
        joiner = InfoJoiner(self.size)
        last, first, ended = self.own_infos(), self.first_infos(range(self.size)), self.ended
        for slot in range(self.size):
            if ended[slot]:
                # What this step returned of the old episode; the observation that the caller gets is the new one's.
                joiner.add({"final_obs": self.row(slot), "final_info": last[slot]}, slot)
            # In real time a slot that did not end in this step may end while the others are reset. Only the answer of
            # the second trip has that episode's record; the caller gets it here, or nowhere.
            elif "episodes" in first[slot]:
                last[slot]["episodes"] = [*last[slot].get("episodes", ()), *first[slot]["episodes"]]
            joiner.add(first[slot] if ended[slot] else last[slot], slot)
        return joiner.infos

    def fill_last(self) -> None:
        """Give rows without a new observation the one that they had last: those cut off, and those not asked.

        Raises:
            ConnectionLostError: A slot never had one.
        """
        for member, rows in self._places:
            if self.valid[rows.start]:
                continue
            last = member.last
            if last is None:
                raise ConnectionLostError(member.remote.url, f"it went before its first observation: {member.error}")
            # The reward, flags and info of the last answer were handed out with it.
            last.reader.write_again(last.message, self.batch, rows.start)

    def row(self, slot: int) -> Any:
        """Return one row's observation."""
        return self._layout.row(self.batch.columns, slot)

    def rows_of(self, slots: list[int]) -> list[Any]:
        """Return the observations of some rows, which share no memory with the others."""
        return self._layout.rows_of(self.batch.columns, slots)

    def rows(self) -> tuple[Any, ...]:
        """Return each row's observation, None where it has none. Small ones may be parts of the columns."""
        if self.complete:
            return self._layout.rows(self.batch.columns, self.size)
        return tuple(self.row(slot) if has else None for slot, has in enumerate(self.valid.tolist()))

    def batched(self) -> Any:
        """Return the observations of all rows as Gymnasium batches them; of an episode that began, its first one."""
        return self._layout.batch(self.batch.columns if self.first is None else self.first)

    def as_universe(self) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Return what a step of `RemoteVectorEnv` returns: rows of observations, None where a slot has none; infos."""
        rows, batch, members = self.rows(), self.batch, self._members
        infos = self.merged_infos()
        infos["n"] = tuple(self.own_infos())
        if self.plain:  # as nearly always
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
    """True if an info, or infos of lanes, say that somebody else acted."""
    return any(ACTION in own for own in info) if isinstance(info, list) else ACTION in info


def _replaced(column: Column, new: Column, slots: Array) -> Column:
    """Return a column with the items of another one in some slots."""
    if isinstance(column, np.ndarray):
        mixed: Array = column.copy()
        mixed[slots] = np.asarray(new)[slots]
        return mixed
    return [new[slot] if slots[slot] else item for slot, item in enumerate(column)]


def slot_states(members: SlotMembers) -> Array:
    """Return where each slot is: an int64 array `(num_envs,)` of `SlotState`."""
    filling = members.filling
    found = [member.state for member in filling]
    states = np.fromiter(found, np.int64, len(found))
    # Only then some world has several lanes: nearly always there is nothing to repeat.
    if len(filling) < len(members.at):
        states = np.repeat(states, [member.lanes for member in filling])
    for member, state in zip(filling, found, strict=True):
        # In real time each lane of a running world may be between two episodes.
        resetting = member.remote.resetting if state is SlotState.RUNNING else None
        if resetting is not None:
            states[member.slots][resetting] = SlotState.RESETTING
    return states
