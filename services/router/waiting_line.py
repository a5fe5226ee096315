"""Who waits for room in the cluster, and who goes next. Pure.

In order of priority and arrival. One that does not fit lets others pass while its patience lasts:
then nobody passes, so that it does not starve.
"""

from bisect import insort
from dataclasses import dataclass

from services.common.errors import Overloaded
from services.router.capacity import Room


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    priority: int
    number: int
    """In order of arrival here."""
    num_tokens: int
    """That the sequence begins with: what it needs to start."""
    since_s: float


class WaitingLine:
    def __init__(self, max_length: int, patience_s: float) -> None:
        self._max_length = max_length
        self._patience_s = patience_s
        self._num_joined = 0
        self._places: list[Place] = []

    def __len__(self) -> int:
        return len(self._places)

    def join(self, priority: int, num_tokens: int, now_s: float) -> Place:
        """Overloaded when the line is as long as it may be.

        It may be worth coming back after as long as whoever waits for longest has waited.
        """
        if len(self._places) >= self._max_length:
            longest_s = max((now_s - place.since_s for place in self._places), default=0.0)
            error = f"{len(self._places)} requests wait for memory already"
            raise Overloaded(error, retry_after_s=max(1.0, longest_s))
        self._num_joined += 1
        place = Place(priority, self._num_joined, num_tokens, now_s)
        insort(self._places, place, key=lambda place: (place.priority, place.number))
        return place

    def leave(self, place: Place) -> None:
        """Whoever waited went away, or gave up; nothing if it has gone in."""
        if place in self._places:
            self._places.remove(place)

    def admit(self, room: Room, now_s: float) -> list[Place]:
        """Who may go now; they are in the line no more."""
        admitted = []
        for place in self._places:
            if room.take(place.num_tokens):
                admitted.append(place)
            elif now_s - place.since_s > self._patience_s:
                break
        self._places = [place for place in self._places if place not in admitted]
        return admitted
