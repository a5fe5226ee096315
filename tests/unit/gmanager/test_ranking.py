"""Creditors stay in order whatever is added and removed."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gmanager.cluster import InstanceInfo
from services.gmanager.ranking import Ranking
from tests.unit.gmanager.builders import make_info

INFOS = [make_info(i, host="ab"[i % 2], model="mn"[i // 4]) for i in range(8)]
SHARES = st.sampled_from([0.0, 0.25, 0.5])


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(INFOS), SHARES), max_size=30))
def test_own_node_first_then_the_emptiest(changes: list[tuple[InstanceInfo, float]]) -> None:
    ranking, shares = Ranking(), dict[int, float]()
    for info, share in changes:
        if info.inst_id in shares:
            ranking.remove(info, shares.pop(info.inst_id))
        else:
            ranking.add(info, share)
            shares[info.inst_id] = share
    for debtor in INFOS:
        able = [i for i in INFOS if i.inst_id in shares and i.model == debtor.model]
        able.sort(key=lambda i: (i.node != debtor.node, shares[i.inst_id], i.inst_id))
        assert list(ranking.best_for(debtor)) == [info.inst_id for info in able]


def test_removing_who_is_not_there_changes_nothing() -> None:
    ranking = Ranking()
    ranking.add(INFOS[0], 0.5)
    ranking.remove(INFOS[0], 0.25)
    ranking.remove(INFOS[2], 0.5)
    assert list(ranking.best_for(INFOS[2])) == [0]
