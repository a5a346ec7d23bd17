"""The worlds of a vector environment: which of them fill slots, and which stand by."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from bridge.client.endpoints import Endpoint, kind_of
from bridge.client.slots.placement import Placement
from bridge.client.slots.policy import SlotPolicy
from bridge.client.slots.pool import Pool
from bridge.client.slots.slot import SPARE, Member
from bridge.client.world.remote import Remote
from bridge.client.world.world_request import WorldInfo, WorldRequest
from bridge.errors import ClosedError, SettingError

__all__ = ["MemberPool"]


class MemberPool(Pool):
    """A pool whose remotes are members: each fills some slots, or stands by.

    Args:
        timeout: Seconds to wait for any answer.
        max_message_bytes: The largest request or answer, in bytes.
        transport: What to connect by, as for `connect`.
    """

    def __init__(self, timeout: float, max_message_bytes: int, transport: str) -> None:
        super().__init__(timeout, max_message_bytes, transport)
        self.members: list[Member] = []
        """Those that fill slots, in the slots' order."""
        self.spares: list[Member] = []
        """Those that stand by."""
        self.policy = SlotPolicy(self.members, self.spares, timeout)
        """Where worlds are, and when what failed is tried again."""
        self.member_at: list[Member] = []
        """The member of each slot."""
        self.member_of: dict[Remote, Member] = {}
        """The member of each remote; what comes of another remote means nothing any more."""
        self.num_envs = 0
        """The number of slots."""
        self.shared = False
        """True if some remotes are in the same place."""
        self.waits_for_lanes = False
        """True if real-time worlds of lanes answer only when every lane has an observation."""
        self.has_errors = False
        """True if a member may have an error."""
        self.step_timeout: float | None = None
        """Seconds after which a world that has not answered a Step is cut; None: as any answer."""

    # Copies and forked processes

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy: its remotes connect anew."""
        members = [
            (member.remote.request, member.remote.info, (member.start, member.lanes, member.endpoint))
            for member in self.everybody()
        ]
        kept = {key: self.__dict__[key] for key in ("num_envs", "shared", "waits_for_lanes", "step_timeout")}
        policy = self.policy.placement, self.policy.connect_timeout, self.policy.moves
        return {"parts": self.parts(), "members": members, "kept": kept, "policy": policy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["parts"])  # type: ignore[misc]
        self.__dict__.update(state["kept"])
        self.policy.placement, self.policy.connect_timeout, moves = state["policy"]
        if moves:
            self.enable_moves()
        self._adopt((self._new_member_remote(request, info), *place) for request, info, place in state["members"])

    def after_fork(self) -> None:
        """Leave the connections to the parent process; the next `check_deadlines` makes some."""
        everybody = [(member.remote, member.start, member.lanes, member.endpoint) for member in self.everybody()]
        self.disown(remote for remote, *_ in everybody)
        if self.policy.moves:
            self.enable_moves()
        self._adopt(everybody)

    def everybody(self) -> list[Member]:
        """Return the members that fill slots, and then the spares."""
        return [*self.members, *self.spares]

    def _adopt(self, everybody: Iterable[tuple[Remote, int, int, str | None]]) -> None:
        """Begin with members that have no connection."""
        made = [self._new_member(*given) for given in everybody]
        self.members[:] = [member for member in made if member.start != SPARE]
        self.spares[:] = [member for member in made if member.start == SPARE]
        self.member_at = [member for member in self.members for _ in range(member.lanes)]
        self.member_of = {member.remote: member for member in made}
        for member in made:
            member.single = member.remote.info is not None and member.remote.info.lanes is None
        self.has_errors = True

    def enable_moves(self) -> None:
        """Look for servers that drain from now on; called before the first one is connected."""
        self.policy.look_at = 0.0
        self.poller.watches_health = True

    # Who is there

    def _new_member_remote(self, request: WorldRequest, info: WorldInfo | None = None) -> Remote:
        remote = self.new_remote(request, info, shared=self.shared)
        if self.waits_for_lanes:
            remote.session.wait_for_all()
        return remote

    def new_remote_at(self, endpoint: Endpoint, placement: Placement, like: Remote) -> Remote:
        """Make a remote that is to take over from another one."""
        remote = self._new_member_remote(placement.request_for(endpoint.url))
        remote.session.know(like.session)
        return remote

    def _new_member(self, remote: Remote, start: int, lanes: int, endpoint: str | None) -> Member:
        kind = None if endpoint is None else kind_of(remote.request.address)
        return Member(remote, start, lanes, endpoint, kind)

    def include(self, remote: Remote, start: int, lanes: int, endpoint: str | None) -> Member:
        """Make a member of a remote: a spare where `start` is `SPARE`, else the last one that fills slots."""
        member = self._new_member(remote, start, lanes, endpoint)
        (self.spares if start == SPARE else self.members).append(member)
        self.member_of[remote] = member
        return member

    def drop(self, member: Member) -> None:
        """Leave a world that is not to fill slots after all, or that stood by, and forget it."""
        (self.spares if member.start == SPARE else self.members).remove(member)
        del self.member_of[member.remote]
        member.remote.close(0.0)

    def give_remote(self, member: Member, remote: Remote) -> None:
        """Have a member another remote than it had; that one is forgotten."""
        del self.member_of[member.remote]
        member.remote = remote
        self.member_of[remote] = member

    def place_members(self) -> None:
        """Give the worlds, all of which are joined, their slots in order.

        Raises:
            SettingError: One has other spaces than the first.
        """
        start = 0
        for member in self.members:
            member.place(start, member.remote.slots)
            start += member.lanes
            self.check_spaces(member)
        self.num_envs = start
        self.member_at = [member for member in self.members for _ in range(member.lanes)]

    def check_spaces(self, member: Member) -> None:
        """Raise SettingError where a world has other spaces than the first, and say what differs."""
        mine, first = member.remote.info, self.world_info()
        if mine is not None and mine.spaces == first.spaces:
            return
        theirs = () if mine is None else mine.spaces
        names = ("observation space", "action space", "reward space")
        pairs = itertools.zip_longest(names, theirs, first.spaces)
        different = "; ".join(f"the {name} {got} and not {wanted}" for name, got, wanted in pairs if got != wanted)
        raise SettingError(
            f"{member.remote.url} has, unlike {self.members[0].remote.url}, {different}; one vector environment takes "
            "worlds of equal spaces"
        )

    def world_info(self) -> WorldInfo:
        """Return what is known of the worlds, whose spaces are equal."""
        world_info = self.members[0].remote.info
        if world_info is None:
            raise ClosedError("this vector environment never joined a world")
        return world_info

    def infos(self) -> list[WorldInfo | None]:
        """Return what is known of each slot's world."""
        return [member.remote.info for member in self.member_at]

    def wait_for_lanes(self) -> None:
        """Have real-time worlds of lanes answer only when every lane has an observation."""
        self.waits_for_lanes = True
        for member in self.members:
            member.remote.session.wait_for_all()
