"""What was decided and why: the last decisions about every debtor, also those to move nothing.

Answers "why is this block there" and "why was nothing moved". Pure, bounded in memory; `planner`
fills it, `server` reads it.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice

from services.common.ids import InstId, ReqId
from services.gmanager.board import Move
from services.gmanager.policy import Decision, Verdict

CAPACITY = 4096


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one move: accepted, refused, failed or only a dry run."""

    outcome: str
    reason: str


@dataclass(slots=True)
class Record:
    """One decision, or the last of several in a row that came to the same."""

    decision: Decision
    first_s: float
    last_s: float
    times: int = 1
    answers: dict[Move, Answer] = field(default_factory=dict)

    def concerns(self, req_id: ReqId | None, inst_id: InstId | None) -> bool:
        decision = self.decision
        inst_ids = {decision.debtor, *(move.destination for move in decision.moves)}
        is_request = req_id is None or decision.req_id == req_id
        return is_request and (inst_id is None or inst_id in inst_ids)


class DecisionLog:
    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._numbers = count()
        #: In order of `last_s`.
        self._records: OrderedDict[int, Record] = OrderedDict()
        #: The last record about each debtor.
        self._last: dict[InstId, int] = {}
        self.moves_issued = 0
        """Moves that sources were told to make, since the start."""

    def note(self, decision: Decision, now_s: float) -> None:
        """Where nothing moves the same is decided every round: such decisions share a record."""
        number = self._last.get(decision.debtor)
        if number is not None and _is_repeated(self._records[number].decision, decision):
            record = self._records[number]
            record.decision, record.last_s = decision, now_s
            record.times += 1
            self._records.move_to_end(number)
            return
        number = next(self._numbers)
        self._records[number] = Record(decision, now_s, now_s)
        self._last[decision.debtor] = number
        if len(self._records) > self._capacity:
            oldest, record = self._records.popitem(last=False)
            if self._last[record.decision.debtor] == oldest:
                del self._last[record.decision.debtor]

    def note_answer(self, move: Move, answer: Answer) -> None:
        """A move that was forgotten meanwhile needs no answer any more."""
        number = self._last.get(move.source)
        if number is not None and move in self._records[number].decision.moves:
            self._records[number].answers[move] = answer

    def find(
        self, req_id: ReqId | None = None, inst_id: InstId | None = None, limit: int = CAPACITY
    ) -> list[Record]:
        """The newest first; of a request, or in which an instance took part."""
        return list(islice(self._matching(req_id, inst_id), limit))

    def _matching(self, req_id: ReqId | None, inst_id: InstId | None) -> Iterator[Record]:
        return (r for r in reversed(self._records.values()) if r.concerns(req_id, inst_id))


def _is_repeated(last: Decision, decision: Decision) -> bool:
    is_move = decision.verdict is Verdict.MOVE
    return not is_move and (last.verdict, last.req_id) == (decision.verdict, decision.req_id)
