"""The memory-intensive side's waiting requests, longest answer first."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import groupby, zip_longest

from blend_core.length_distribution import LengthDistribution


class Skipping:
    """A list whose taken entries are skipped in nearly constant time, however they were taken."""

    __slots__ = ("_is_waiting", "_next", "slots")

    def __init__(self, slots: list[int], is_waiting: Callable[[int], bool]) -> None:
        """`is_waiting` tells of a slot whether it is still to be had; once it is not, it never is again."""
        self.slots = slots
        self._is_waiting = is_waiting
        self._next = list(range(len(slots) + 1))

    def first(self, place: int = 0) -> int | None:
        """Returns the first waiting slot at or behind a place."""
        place = self._first_place(place)
        return self.slots[place] if place < len(self.slots) else None

    def __iter__(self) -> Iterator[int]:
        """Waiting slots in order."""
        place = self._first_place(0)
        while place < len(self.slots):
            yield self.slots[place]
            place = self._first_place(place + 1)

    def _first_place(self, place: int) -> int:
        skip, slots = self._next, self.slots
        while True:
            root = skip[place]
            while skip[root] != root:
                root = skip[root]
            # Paths end at their root once they were walked, so that they stay short.
            while skip[place] != root:
                skip[place], place = root, skip[place]
            if root == len(slots) or self._is_waiting(slots[root]):
                return root
            skip[root] = root + 1
            place = root


class LongFirst:
    """Which waiting request of the memory-intensive side comes next.

    Of requests with known lengths the longest comes first, those behind one prefix together: what begins
    early ends early, and short answers fill the gaps later. Those of unknown length with the same bound come
    in planned order, all their kinds mixed, so that each is learned about. The requests of a bundle follow
    one another in planned order, where the longest of them, or of the known ones around them that share
    prefixes too, has its turn.
    """

    __slots__ = ("_alone", "_hidden", "_known", "_lengths", "_stand_in")

    def __init__(
        self,
        planned: list[int],
        lengths_of: Callable[[int], LengthDistribution | None],
        is_alone: Callable[[int], bool],
        bundle_of: Callable[[int], int],
        output_tokens: Callable[[int], float],
        is_waiting: Callable[[int], bool],
    ) -> None:
        """Takes the side's slots in the order of the scan.

        Args:
            planned: the right end of the plan first.
            lengths_of: what is known of a slot's length; None where the length is.
            is_alone: whether a slot shares no prefix with the one before it or behind it in the plan.
            bundle_of: number of a slot's bundle; below 0 for none.
            output_tokens: known length of a slot.
            is_waiting: whether a slot is still to be had.
        """
        known: list[int] = []
        by_bound: dict[int, list[int]] = {}
        self._stand_in: dict[int, int] = {}
        for members in _bundled(planned, bundle_of):
            bounds = {
                slot: lengths.max_tokens for slot in members if (lengths := lengths_of(slot)) is not None
            }
            if not bounds:
                known.extend(members)
                continue
            longest = max(bounds, key=bounds.__getitem__)
            by_bound.setdefault(bounds[longest], []).extend(members)
            if len(members) > 1:
                self._stand_in.update(dict.fromkeys(members, longest))
        alone = sorted(
            (slot for slot in known if is_alone(slot)), key=lambda slot: (-output_tokens(slot), slot)
        )
        runs = _together(known, is_alone, output_tokens)
        for run in runs:
            if len(run) > 1:
                self._stand_in.update(dict.fromkeys(run, max(run, key=output_tokens)))
        self._known = Skipping([slot for run in runs for slot in run], is_waiting)
        self._alone = Skipping(alone, is_waiting)
        self._lengths = [-output_tokens(slot) for slot in alone]
        self._hidden = [Skipping(slots, is_waiting) for slots in by_bound.values()]

    def head(self, expected_tokens: Callable[[int], float]) -> int | None:
        """Returns the request that is expected to run longest; None where none waits.

        One that comes together with others has the turn of the longest of them.
        """
        longest = self._known.first() if self._known.slots else None
        if len(self._hidden) == 1 and longest is None:
            return self._hidden[0].first()
        stand_in = self._stand_in
        longest_tokens = -1.0 if longest is None else expected_tokens(stand_in.get(longest, longest))
        for slots in self._hidden:
            slot = slots.first()
            if slot is not None and (tokens := expected_tokens(stand_in.get(slot, slot))) > longest_tokens:
                longest, longest_tokens = slot, tokens
        return longest

    def filler(self, output_tokens: float) -> int | None:
        """Returns the longest request of known length within a bound, of those that share nothing."""
        return self._alone.first(bisect_left(self._lengths, -output_tokens))

    def __iter__(self) -> Iterator[int]:
        """Waiting slots, roughly in the order in which they come: any of the queues may be next."""
        for slots in zip_longest(self._known, *self._hidden):
            yield from (slot for slot in slots if slot is not None)


def _bundled(planned: list[int], bundle_of: Callable[[int], int]) -> Iterator[list[int]]:
    """Returns slots by themselves, and those of a bundle, which are neighbours, together."""
    for bundle, slots in groupby(planned, bundle_of):
        if bundle >= 0:
            yield list(slots)
        else:
            yield from ([slot] for slot in slots)


def _together(
    known: list[int], is_alone: Callable[[int], bool], output_tokens: Callable[[int], float]
) -> list[list[int]]:
    """Sorts by length, longest first, but leaves neighbours that share a prefix behind one another."""
    runs: list[list[int]] = []
    was_alone = True
    for slot in known:
        if is_alone(slot) or was_alone:
            runs.append([])
        runs[-1].append(slot)
        was_alone = is_alone(slot)
    runs.sort(key=lambda run: (-max(map(output_tokens, run)), run[0]))
    return runs
