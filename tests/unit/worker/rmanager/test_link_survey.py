from dataclasses import replace

from protos.infinite_llm.v1 import types_pb2
from services.common.errors import PartLost
from services.common.ids import Incarnation, InstId
from services.worker.distattention.debtor import Peer
from services.worker.distattention.link_terms import LinkBook, LinkTerms
from services.worker.engine.engine import EngineSnapshot
from services.worker.rmanager.link_survey import LinkSurvey
from services.worker.rmanager.peers import Peers, PeerView
from services.worker.rmanager.perf_report import PerfReport

VIEW = PeerView(InstId(2), Incarnation(1), "h:1", "tcp:h:2", 16, 100, "m", 10, 6)
TERMS = LinkTerms(1e-4, 1e9)


class Surveyed:
    def __init__(self) -> None:
        self.peers, self.book = Peers("m", 100, keep_free=1), LinkBook()
        self.asked: list[int] = []
        self.survey = LinkSurvey(self.peers, self.book, self._measure)

    def _measure(self, peer: Peer) -> LinkTerms:
        self.asked.append(peer.inst_id)
        if peer.inst_id == 9:
            raise PartLost(peer.inst_id, "gone")
        return TERMS


async def test_each_peer_is_asked_in_turn_and_rarely_again() -> None:
    here = Surveyed()
    here.peers.update([VIEW, replace(VIEW, inst_id=InstId(3))])
    for now_s in (0.0, 2.0, 4.0, 6.0, 120.0, 121.0, 122.0):
        await here.survey.ask_next(now_s)
    assert here.asked == [2, 3, 2, 3]
    assert len(here.book.terms()) == 2


async def test_a_peer_that_does_not_answer_keeps_nobody_waiting() -> None:
    here = Surveyed()
    here.peers.update([replace(VIEW, inst_id=InstId(9)), replace(VIEW, inst_id=InstId(10))])
    for now_s in (0.0, 2.0, 4.0):
        await here.survey.ask_next(now_s)
    assert here.asked == [9, 10]
    assert [peer.inst_id for peer in here.book.terms()] == [10]


async def test_who_leaves_the_view_for_a_moment_is_not_asked_again_and_stays_known() -> None:
    """The view of a large cluster lists the emptiest, now these and now those."""
    here, other = Surveyed(), replace(VIEW, inst_id=InstId(3))
    for now_s, view in [(0.0, VIEW), (2.0, other), (4.0, VIEW), (6.0, other), (8.0, VIEW)]:
        here.peers.update([view])
        await here.survey.ask_next(now_s)
    assert here.asked == [2, 3]
    assert sorted(peer.inst_id for peer in here.book.terms()) == [2, 3]
    here.peers.update([VIEW])
    await here.survey.ask_next(125.0)
    assert [peer.inst_id for peer in here.book.terms()] == [2]  # long gone


async def test_a_new_incarnation_is_another_link() -> None:
    here = Surveyed()
    await here.survey.ask_next(0.0)
    here.peers.update([VIEW])
    await here.survey.ask_next(1.0)
    here.peers.update([replace(VIEW, incarnation=Incarnation(5))])
    await here.survey.ask_next(2.0)
    assert here.asked == [2, 2]
    assert [peer.incarnation for peer in here.book.terms()] == [5]


def test_a_link_is_reported_when_it_has_changed_much() -> None:
    book, perf = LinkBook(), types_pb2.PerfConstants()
    report, peer = PerfReport(perf, book), Peer(InstId(2), Incarnation(1), "tcp:h:2")

    def told() -> list[tuple[int, float, float]]:
        report.refresh(EngineSnapshot())
        return [(link.inst_id, link.round_trip_s, link.bytes_per_s) for link in perf.links]

    assert told() == []
    book.put(peer, TERMS)
    assert told() == [(2, 1e-4, 1e9)]
    book.put(peer, LinkTerms(1.1e-4, 0.9e9))
    assert told() == [(2, 1e-4, 1e9)]
    book.put(peer, LinkTerms(3e-4, 0.9e9))
    assert told() == [(2, 3e-4, 0.9e9)]
    book.retain([])
    assert told() == []
