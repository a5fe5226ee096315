from dataclasses import replace

from services.common.ids import Incarnation, InstId
from services.worker.rmanager.peers import Peers, PeerView, Unlisted

VIEW = PeerView(InstId(2), Incarnation(1), "h:1", "tcp:h:2", 16, 100, "m", 10, 6)


def peers_of(*views: PeerView) -> Peers:
    peers = Peers("m", 100, keep_free=1)
    peers.update(views)
    return peers


def test_the_most_free_is_asked_first() -> None:
    other = replace(VIEW, inst_id=InstId(3), free_blocks=8)
    assert [v.inst_id for v in peers_of(VIEW, other).best_creditors()] == [3, 2]


def test_a_fresh_hint_keeps_its_own_order() -> None:
    near, far = VIEW, replace(VIEW, inst_id=InstId(3), free_blocks=8)
    assert [v.inst_id for v in peers_of().best_creditors([near, far])] == [2, 3]


def test_every_creditor_keeps_some_blocks_for_itself() -> None:
    peers = peers_of(VIEW, replace(VIEW, inst_id=InstId(3), free_blocks=1))
    assert (peers.free_blocks, peers.total_blocks) == (5, 18)
    assert [v.inst_id for v in peers.best_creditors()] == [2]


def test_whoever_drains_lends_nothing() -> None:
    peers = peers_of(replace(VIEW, is_draining=True))
    assert (peers.free_blocks, peers.best_creditors()) == (0, [])


def test_another_model_or_block_format_cannot_lend() -> None:
    wrong = [replace(VIEW, model="x"), replace(VIEW, block_bytes=101)]
    assert peers_of(*wrong).total_blocks == 0
    assert peers_of().best_creditors(wrong) == []


def test_a_silent_peer_is_left_out_until_the_next_view() -> None:
    peers = peers_of(VIEW)
    peers.forget(InstId(2))
    assert (peers.best_creditors(), peers.free_blocks) == ([], 0)
    # It may be back in a moment: what the cluster can hold at best has not changed.
    assert peers.total_blocks == 9
    peers.update([VIEW])
    assert peers.best_creditors() == [VIEW]


def test_what_a_peer_says_of_itself_replaces_the_view() -> None:
    peers = peers_of(VIEW)
    peers.learn_free(InstId(2), 3)
    assert peers.free_blocks == 2
    peers.learn_free(InstId(9), 3)  # nobody we know
    assert peers.free_blocks == 2


def test_without_news_everybody_is_worth_asking() -> None:
    peers = peers_of(replace(VIEW, free_blocks=0))
    peers.doubt()
    assert peers.free_blocks == 9


def test_who_is_not_listed_counts_for_what_could_be_borrowed_at_best() -> None:
    peers = Peers("m", 100, keep_free=1)
    peers.update([VIEW], Unlisted(num_peers=3, num_blocks=30))
    assert (peers.free_blocks, peers.total_blocks) == (5, 9 + 27)
