"""Whom a heartbeat's answer tells of, in small clusters and in large ones."""

from services.gmanager.cluster import Instance, InstanceLoad
from services.gmanager.peer_views import MAX_PEERS, PeerDirectory, PeerViews
from tests.unit.gmanager.builders import make_instance


def cluster(num_instances: int) -> list[Instance]:
    """Two to a node; instance i has i blocks free."""
    return [
        make_instance(i, InstanceLoad(free_blocks=i), num_blocks=1000, host=f"node-{i // 2}")
        for i in range(num_instances)
    ]


def listed(peers: PeerViews) -> list[int]:
    return [view.info.inst_id for view in peers.views]


def test_a_small_cluster_is_told_of_whole() -> None:
    instances = cluster(4)
    peers = PeerDirectory(lambda: instances).peers_of(instances[0])
    assert listed(peers) == [1, 3, 2]
    assert (peers.num_unlisted, peers.unlisted_blocks) == (0, 0)


def test_of_a_large_one_the_nearest_and_the_emptiest_are_listed_and_the_others_counted() -> None:
    instances = cluster(100)
    peers = PeerDirectory(lambda: instances).peers_of(instances[7])
    assert listed(peers) == [6, *range(99, 99 - MAX_PEERS + 1, -1)]
    assert peers.num_unlisted == 99 - MAX_PEERS
    assert peers.unlisted_blocks == (99 - MAX_PEERS) * 1000


def test_who_would_be_listed_is_not_listed_to_itself() -> None:
    instances = cluster(100)
    peers = PeerDirectory(lambda: instances).peers_of(instances[99])
    assert listed(peers) == list(range(98, 98 - MAX_PEERS, -1))


def test_others_that_cannot_lend_are_not_counted() -> None:
    instances = [make_instance(1), make_instance(2, model="other"), make_instance(3)]
    instances[2] = make_instance(3, InstanceLoad(free_blocks=50, draining=True))
    peers = PeerDirectory(lambda: instances).peers_of(instances[0])
    assert listed(peers) == [3]
    assert peers.views[0].load.draining
    assert (peers.num_unlisted, peers.unlisted_blocks) == (0, 0)


def test_a_large_cluster_is_ranked_anew_after_a_tenth_of_its_reports() -> None:
    instances = cluster(100)
    directory = PeerDirectory(lambda: instances)
    before = listed(directory.peers_of(instances[7]))
    instances[40] = make_instance(40, InstanceLoad(free_blocks=900), num_blocks=1000, host="far")
    answers = [listed(directory.peers_of(instances[7])) for _ in range(10)]
    assert answers[:9] == [before] * 9
    assert answers[9][1] == 40


def test_a_small_one_is_ranked_for_every_report() -> None:
    instances = cluster(3)
    directory = PeerDirectory(lambda: instances)
    directory.peers_of(instances[0])
    instances[1] = make_instance(1, InstanceLoad(free_blocks=900), num_blocks=1000, host="node-1")
    assert listed(directory.peers_of(instances[0])) == [1, 2]
