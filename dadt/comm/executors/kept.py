"""Keeps a rank's TCP connections with the ranks that train on after a loss, for their next group."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from dadt._core import KeptLink


@dataclass(slots=True)
class Kept:
    """One rank's connections with others that stand although the group that used them has failed."""

    members: Sequence[int]
    """Numbers, in the whole job, of the ranks that train now."""
    wanted: Collection[int] = ()
    """The ranks whose connections are kept when the present group fails."""
    links: dict[tuple[str, int], KeptLink] = field(default_factory=dict)
    """The connections, by the group's name and the other rank's number in the whole job."""

    def enter(self, members: Sequence[int]) -> None:
        """Begin the next generation of ranks. If nobody is lost or new, connections have failed, and this rank may not
        know which, so none is kept."""
        self._want(members if list(members) != list(self.members) else ())
        self.members = members

    @property
    def group(self) -> KeptGroup:
        """The connections of the group of all these ranks."""
        return KeptGroup(self, self.members)

    def end(self) -> None:
        """Keep nothing from now on."""
        self._want(())

    def _want(self, ranks: Collection[int]) -> None:
        self.wanted = ranks
        self.links = {key: link for key, link in self.links.items() if key[1] in ranks}


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """The kept connections of one group of ranks. `ranks` are always indices in `members`."""

    kept: Kept
    members: Sequence[int]
    """Numbers of the ranks in the whole job."""
    name: str = ""
    """Name by which a rank distinguishes groups in which it is at once."""

    def named(self, name: str) -> KeptGroup:
        return replace(self, name=name)

    def offered(self, ranks: Sequence[int]) -> dict[int, KeptLink]:
        """Return the connections that a new group of these ranks may use, by their indices in the group. They stay here
        until `take`, since the new group may fail before it uses them."""
        links = {place: self.kept.links.get((self.name, self.members[rank])) for place, rank in enumerate(ranks)}
        return {place: link for place, link in links.items() if link is not None}

    def take(self, rank: int) -> list[int]:
        """Return the descriptors of the connection with a rank, which the caller then owns."""
        return self.kept.links.pop((self.name, self.members[rank])).take()

    def fill(self, ranks: Sequence[int], links: Sequence[KeptLink | None]) -> None:
        """Keep the connections of a group that has failed, as far as they stand and the next generation wants them.
        links: by the ranks' indices in the group."""
        for rank, link in zip(ranks, links, strict=True):
            if link is not None and self.members[rank] in self.kept.wanted:
                self.kept.links[self.name, self.members[rank]] = link
