"""The members of a vector environment: the remotes that fill its slots, and the spares."""

from __future__ import annotations

from typing import Any

from bridge.core.client.endpoints import Endpoint, ListedEndpoint
from bridge.core.client.slots.slot import Member, StandBy
from bridge.core.client.wire.poller import Poller
from bridge.core.client.world.remote import Delivery, Remote
from bridge.core.client.world.world_request import WorldInfo, WorldRequest
from bridge.errors import SettingError

__all__ = ["SlotMembers"]


class SlotMembers:
    """The members of a pool, each a remote and the slots that it fills.

    Args:
        poller: What the remotes deliver to.
    """

    def __init__(self, poller: Poller[Delivery]) -> None:
        self.filling: list[Member] = []
        """The members that fill slots, in the slots' order."""
        self.spares: list[Member] = []
        """The spares."""
        self.at: list[Member] = []
        """The member of each slot; empty until all worlds have been joined once."""
        self.of: dict[Remote, Member] = {}
        """The member of each current remote. Messages of other remotes are dropped."""
        self.shared = False
        """True if several remotes connect to the same address."""
        self._waits_for_lanes = False
        self._poller = poller

    # Copies

    def kept(self) -> tuple[Any, ...]:
        """Return the state for a copy."""
        # Include only the spares that the user named: the policy of the copy makes its own.
        own = [member for member in self.filling + self.spares if member.stands_by is None or member.is_named]
        worlds = [
            (
                # In the copy, a slot that has left its pinned server begins there again.
                member.home.request if member.home is not None and member.is_displaced else member.remote.request,
                member.remote.info,
                member.home or member.endpoint,
                member.start,
                member.lanes,
                member.home,
                member.stands_by,
            )
            for member in own
        ]
        return worlds, self.shared, self._waits_for_lanes

    def restore(self, kept: tuple[Any, ...]) -> None:
        """Restore the state that `kept` of the original returned. The remotes connect anew."""
        worlds, self.shared, self._waits_for_lanes = kept
        for request, info, endpoint, start, lanes, home, stands_by in worlds:
            self._add(self._new_remote(request, info), endpoint, start, lanes, home, stands_by)
        self._number_slots()

    # Who is there

    def _new_remote(self, request: WorldRequest, info: WorldInfo | None = None, like: Remote | None = None) -> Remote:
        """Make a remote, with `info` about its world, or with the knowledge of `like` about its own world."""
        remote = Remote(request, self._poller, info, shared=self.shared)
        if like is not None:
            remote.know(like)
        if self._waits_for_lanes:
            remote.wait_for_all()
        return remote

    def _add(
        self,
        remote: Remote,
        endpoint: Endpoint,
        start: int,
        lanes: int,
        home: ListedEndpoint | None,
        stands_by: StandBy | None,
    ) -> Member:
        member = self.of[remote] = Member(remote, endpoint, start, lanes, home, remote.single, stands_by=stands_by)
        (self.filling if stands_by is None else self.spares).append(member)
        return member

    def add(
        self,
        request: WorldRequest,
        endpoint: Endpoint,
        *,
        lanes: int = 1,
        stands_by: StandBy | None = None,
    ) -> Member:
        """Add a member, whose remote has no connection yet.

        Args:
            request: The world.
            endpoint: The endpoint of the world. The member is pinned to an endpoint of a list.
            lanes: The number of its slots, as far as known.
            stands_by: The purpose of a spare; None: it fills slots, which `place` assigns.
        """
        # A slot may move to it before it is joined, so assume until then that its world is like the others.
        like = self.filling[0].remote if self.at else None
        start = len(self.filling) if stands_by is None else 0
        home = endpoint if isinstance(endpoint, ListedEndpoint) else None
        return self._add(self._new_remote(request, like=like), endpoint, start, lanes, home, stands_by)

    def drop(self, member: Member) -> None:
        """Leave the world of a member, and remove the member."""
        # Messages that still arrive from its remote find no member, and are dropped.
        (self.filling if member.stands_by is None else self.spares).remove(member)
        del self.of[member.remote]
        member.remote.close(0.0)

    def replace_remote(self, member: Member, request: WorldRequest) -> None:
        """Give a member another remote, and remove its previous one."""
        before = self.of.pop(member.remote).remote
        member.remote = self._new_remote(request, like=before)
        self.of[member.remote] = member

    def swap_worlds(self, member: Member, spare: Member) -> None:
        """Swap the remotes and endpoints of two members."""
        member.remote, spare.remote = spare.remote, member.remote
        member.endpoint, spare.endpoint = spare.endpoint, member.endpoint
        self.of[member.remote], self.of[spare.remote] = member, spare

    # Their slots

    def place(self) -> None:
        """Assign the slots in order, after all worlds were joined.

        Raises:
            SettingError: A world has other spaces than the first one.
        """
        start = 0
        for member in self.filling:
            member.place(start, member.remote.slots)
            start += member.lanes
            self.check_spaces(member)
        self._number_slots()

    def _number_slots(self) -> None:
        self.at = [member for member in self.filling for _ in range(member.lanes)]

    # Their worlds

    def check_spaces(self, member: Member) -> None:
        """Raise SettingError with the differences if a world has other spaces than the first one."""
        own, first = member.remote, self.filling[0].remote
        different = own.known_info().difference(first.known_info())
        if different:
            raise SettingError(
                f"{own.url} has, unlike {first.url}, {different}; one vector environment takes worlds of equal spaces"
            )

    def world_info(self) -> WorldInfo:
        """Return the information about the worlds, which all have equal spaces."""
        return self.filling[0].remote.known_info()

    def wait_for_lanes(self) -> None:
        """Make real-time worlds of lanes answer only when every lane has an observation."""
        self._waits_for_lanes = True
        for remote in self.of:
            remote.wait_for_all()
