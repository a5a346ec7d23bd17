"""The states of a connection at the server, and what leads from one to the next: one literal table.

`Session` moves by the table and in no other way; a request that is not in it in the present state is refused.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["REMEDIES", "STEP_EVENTS", "TRANSITIONS", "SessionEvent", "SessionState"]


class SessionState(enum.Enum):
    """Where a connection is."""

    UNJOINED = "unjoined"
    JOINED = "joined"
    """In a world; no sequence has begun."""
    RUNNING = "running"
    """In a sequence."""
    TERMINATED = "terminated"
    """The sequence ended; the next Step begins another."""
    INTERRUPTED = "interrupted"
    """The sequence was cut off; the next Step begins another."""
    CLOSED = "closed"
    """The stream ended."""


class SessionEvent(enum.Enum):
    """An event of a connection; a Step is one of four events by its outcome."""

    CREATE_WORLD = "CreateWorld"
    JOIN_WORLD = "JoinWorld"
    STEP_BEGAN = "Step, first of a sequence"
    STEP_RAN = "Step, running on"
    STEP_TERMINATED = "Step, terminated"
    STEP_INTERRUPTED = "Step, interrupted"
    RESET = "Reset"
    RESET_WORLD = "ResetWorld"
    PLACED = "placed"
    ALL_PLACED = "all agents placed"
    LEAVE_WORLD = "LeaveWorld"
    DESTROY_WORLD = "DestroyWorld"
    EXTENSION = "extension"
    END = "end of stream"


_U, _J, _R, _T, _I, _C = SessionState  # in the order of their definition

# A state says two things: whether the connection is in a world, and where it is in a sequence there. Requests move it,
# and so does what the environment answers: a Step is one of four events, of which the last three are told apart only
# once the environment has stepped.
#
# - A Step outside RUNNING is always STEP_BEGAN, whatever its actions (D-9), and leads to RUNNING. So no two answers in
#   a row say that a sequence is over (D-13), and a client may send Steps ahead, across ends (D-25).
# - UNJOINED has no row for Step and Reset (D-8), and it alone has one for JoinWorld: nobody is in two worlds (D-6).
# - ResetWorld and DestroyWorld name a world, and so are possible while unjoined.
# - Reset, and a ResetWorld of its own world, lead from RUNNING to INTERRUPTED although no Step has told the client so:
#   it asked for the end itself. A ResetWorld of another connection is no event here. This one hears of it by its next
#   Step, as STEP_INTERRUPTED (D-15).
# - A Step that ends a sequence leads out of RUNNING also where its answer cannot be sent. The next Step then tells the
#   end and moves nothing (`answer_lost`).
# - PLACED begins a sequence as a Step does, whose answer the message's is: the environment goes on in a situation that
#   it was not led into by this sequence. In a world of several agents a client has a connection for each, and one
#   message is answered by one of them: ALL_PLACED ends the sequences of all, and their next Steps begin others there.
# - CreateWorld, DestroyWorld and extensions have rows that change nothing, so that CLOSED, which has no row, refuses
#   them.
TRANSITIONS: Mapping[tuple[SessionState, SessionEvent], SessionState] = {
    (_U, SessionEvent.CREATE_WORLD): _U,
    (_U, SessionEvent.JOIN_WORLD): _J,
    (_U, SessionEvent.RESET_WORLD): _U,
    (_U, SessionEvent.LEAVE_WORLD): _U,  # D-16: a no-op
    (_U, SessionEvent.DESTROY_WORLD): _U,
    (_U, SessionEvent.EXTENSION): _U,
    (_U, SessionEvent.END): _C,
    (_J, SessionEvent.CREATE_WORLD): _J,
    (_J, SessionEvent.STEP_BEGAN): _R,
    (_J, SessionEvent.RESET): _J,
    (_J, SessionEvent.RESET_WORLD): _J,
    (_J, SessionEvent.PLACED): _R,
    (_J, SessionEvent.ALL_PLACED): _J,
    (_J, SessionEvent.LEAVE_WORLD): _U,
    (_J, SessionEvent.DESTROY_WORLD): _J,
    (_J, SessionEvent.EXTENSION): _J,
    (_J, SessionEvent.END): _C,
    (_R, SessionEvent.CREATE_WORLD): _R,
    (_R, SessionEvent.STEP_RAN): _R,
    (_R, SessionEvent.STEP_TERMINATED): _T,
    (_R, SessionEvent.STEP_INTERRUPTED): _I,
    (_R, SessionEvent.RESET): _I,
    (_R, SessionEvent.RESET_WORLD): _I,
    (_R, SessionEvent.PLACED): _R,
    (_R, SessionEvent.ALL_PLACED): _I,
    (_R, SessionEvent.LEAVE_WORLD): _U,
    (_R, SessionEvent.DESTROY_WORLD): _R,
    (_R, SessionEvent.EXTENSION): _R,
    (_R, SessionEvent.END): _C,
    (_T, SessionEvent.CREATE_WORLD): _T,
    (_T, SessionEvent.STEP_BEGAN): _R,  # D-13: never two non-running states in a row
    (_T, SessionEvent.RESET): _T,
    (_T, SessionEvent.RESET_WORLD): _T,
    (_T, SessionEvent.PLACED): _R,
    (_T, SessionEvent.ALL_PLACED): _T,
    (_T, SessionEvent.LEAVE_WORLD): _U,
    (_T, SessionEvent.DESTROY_WORLD): _T,
    (_T, SessionEvent.EXTENSION): _T,
    (_T, SessionEvent.END): _C,
    (_I, SessionEvent.CREATE_WORLD): _I,
    (_I, SessionEvent.STEP_BEGAN): _R,
    (_I, SessionEvent.RESET): _I,
    (_I, SessionEvent.RESET_WORLD): _I,
    (_I, SessionEvent.PLACED): _R,
    (_I, SessionEvent.ALL_PLACED): _I,
    (_I, SessionEvent.LEAVE_WORLD): _U,
    (_I, SessionEvent.DESTROY_WORLD): _I,
    (_I, SessionEvent.EXTENSION): _I,
    (_I, SessionEvent.END): _C,
}

REMEDIES: Mapping[SessionEvent, str] = {
    SessionEvent.JOIN_WORLD: "this connection is in a world already; send LeaveWorld first, or use another connection",
    SessionEvent.STEP_BEGAN: "this connection is in no world; send JoinWorld first",
    SessionEvent.RESET: "this connection is in no world; send JoinWorld first",
}
"""What a client that asks for what is not possible is to do; of other events the connection is closed."""
STEP_EVENTS: Mapping[int, SessionEvent] = {
    pb.RUNNING: SessionEvent.STEP_RAN,
    pb.TERMINATED: SessionEvent.STEP_TERMINATED,
    pb.INTERRUPTED: SessionEvent.STEP_INTERRUPTED,
}
"""What the state that a Step answers is to the table."""
