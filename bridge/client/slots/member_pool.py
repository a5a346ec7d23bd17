"""Who fills the slots of a vector environment: remotes, each with the slots that it fills, and spares.

This is the part that makes members, connects them, and makes them anew in a copy. It decides nothing, and waits for
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, TypeAlias

from bridge.client.endpoints import kind_of
from bridge.client.slots.policy import SlotPolicy
from bridge.client.slots.pool import Pool
from bridge.client.slots.slot import SPARE, Member, SlotEvent
from bridge.client.world.remote import Remote
from bridge.client.world.world_request import WorldInfo, WorldRequest
from bridge.errors import SettingError
from bridge.transport import keepalive

__all__ = ["MemberPool"]

_World: TypeAlias = tuple[WorldRequest, WorldInfo | None, int, int, str | None]
"""A world of a copy: its request, what is known of it, its first slot, its lanes, and its endpoint."""


class MemberPool(Pool):
    """The remotes of a vector environment: each fills slots, or stands by.

    Args:
        timeout: Seconds to wait for any answer.
    """

    def __init__(self, timeout: float) -> None:
        super().__init__(timeout)
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
        kept = {key: self.__dict__[key] for key in ("num_envs", "shared", "waits_for_lanes", "step_timeout")}
        policy = self.policy.placement, self.policy.connect_timeout, self.policy.moves
        return {"timeout": self.timeout, "worlds": self._worlds(), "kept": kept, "policy": policy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["timeout"])  # type: ignore[misc]
        self.__dict__.update(state["kept"])
        self.policy.placement, self.policy.connect_timeout, moves = state["policy"]
        self._adopt(state["worlds"], moves=moves)

    def after_fork(self) -> None:
        """Leave the connections to the parent process; the next `check_deadlines` makes some."""
        worlds = self._worlds()
        self.disown(member.remote for member in self.policy.everybody())
        self._adopt(worlds, moves=self.policy.moves)

    def _worlds(self) -> list[_World]:
        """Return the worlds that a copy joins: those of all slots, and those that stand by for any."""
        return [
            (member.home or member.remote.request, member.remote.info, member.start, member.lanes, member.endpoint)
            for member in self.policy.everybody()
            if member.relieves is None
        ]

    def _adopt(self, worlds: Iterable[_World], *, moves: bool) -> None:
        """Begin with worlds that have no connection."""
        if moves:
            self.enable_moves()
        for known in (self.members, self.spares, self.member_of):
            known.clear()
        for request, info, start, lanes, endpoint in worlds:
            member = self._new_member(self._new_remote(request, info), start, lanes, endpoint)
            member.single = info is not None and info.lanes is None
        self.member_at = [member for member in self.members for _ in range(member.lanes)]
        self.has_errors = True

    def enable_moves(self) -> None:
        """Look for servers that drain from now on; called before the first one is connected."""
        self.policy.look_at = 0.0
        self.poller.watches_health = True

    # Who is there

    def _new_remote(self, request: WorldRequest, info: WorldInfo | None = None, like: Remote | None = None) -> Remote:
        """Make a remote; of its world that is known which `info` says, or which `like` knows of its own."""
        remote = self.new_remote(request, info, shared=self.shared)
        if like is not None:
            remote.session.know(like.session)
        if self.waits_for_lanes:
            remote.session.wait_for_all()
        return remote

    def _new_member(self, remote: Remote, start: int, lanes: int, endpoint: str | None) -> Member:
        kind = None if endpoint is None else kind_of(remote.request.address)
        member = self.member_of[remote] = Member(remote, start, lanes, endpoint, kind)
        (self.spares if start == SPARE else self.members).append(member)
        return member

    def drop(self, member: Member) -> None:
        """Leave a world that is not to fill slots after all, or that stood by, and forget it."""
        (self.spares if member.start == SPARE else self.members).remove(member)
        del self.member_of[member.remote]
        member.remote.close(0.0)

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
        different = member.remote.known_info().difference(self.world_info())
        if different:
            raise SettingError(
                f"{member.remote.url} has, unlike {self.members[0].remote.url}, {different}; one vector environment "
                "takes worlds of equal spaces"
            )

    def world_info(self) -> WorldInfo:
        """Return what is known of the worlds, whose spaces are equal."""
        return self.members[0].remote.known_info()

    def wait_for_lanes(self) -> None:
        """Have real-time worlds of lanes answer only when every lane has an observation."""
        self.waits_for_lanes = True
        for member in self.members:
            member.remote.session.wait_for_all()

    # Connecting

    def add(self, request: WorldRequest, *, spare: bool = False, lanes: int = 1, endpoint: str | None = None) -> Member:
        """Connect a world, without waiting for it.

        Args:
            request: The world.
            spare: Whether it stands by; else `place_members` gives it its slots.
            lanes: The number of its slots, as far as is known.
            endpoint: The key of its endpoint in a directory.
        """
        like = self.members[0].remote if self.num_envs else None
        start = SPARE if spare else len(self.members)
        member = self._new_member(self._new_remote(request, like=like), start, lanes, endpoint)
        self.open(member)
        return member

    def connect_instead(self, member: Member, request: WorldRequest) -> None:
        """Give up a connection, or the making of it, and make another one."""
        member.remote.close(0.0)
        member.handle(SlotEvent.LOST)
        member.refusal = None  # it was refused where it leaves
        self.replace_remote(member, request)
        self.open(member)

    def replace_remote(self, member: Member, request: WorldRequest) -> None:
        """Let a member have another remote; that which it had is forgotten, but what it counted goes along."""
        before = self.member_of.pop(member.remote).remote
        member.remote = self._new_remote(request, like=before)
        member.remote.record = before.record
        self.member_of[member.remote] = member

    def open(self, member: Member) -> None:
        """Start to connect."""
        keepalive.add(self)
        now = time.monotonic()
        member.deadline, member.silent_until = now + self.timeout, now + self.policy.connect_timeout
        member.handle(SlotEvent.CONNECT)
        member.remote.open()
