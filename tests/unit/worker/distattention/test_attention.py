import pytest
import torch

from kernels.reference import ReferenceKernels, attention_reference, merge
from services.common.errors import InternalError, PartLost
from services.common.ids import ReqId
from services.worker.distattention.debtor import RemotePart
from tests.unit.worker.distattention.pieces import (
    MAX_ROWS,
    NUM_HEADS,
    Creditor,
    assert_same,
    computed,
    move_of,
    new_query,
    owner_peer,
)

ME = owner_peer()


def part(req_id: int, num_rows: int) -> RemotePart:
    return RemotePart(ReqId(req_id), (move_of(req_id),), num_rows)


def test_the_answer_is_what_the_kernel_says_here(creditor: Creditor) -> None:
    creditor.lender.lend(ME, 1, [3, 0, 7])
    creditor.lender.lend(ME, 2, [11])
    channel = creditor.channel(ME)
    # Steps of different sizes over one connection; the last is a long prefill chunk.
    for first, second in ((1, 1), (3, 2), (MAX_ROWS - 1, 1)):
        channel.begin_step([part(1, first), part(2, second)])
        for layer in (0, 1):
            q = new_query(first + second, seed=layer)
            channel.send_query(layer, q)
            expected = computed(q, creditor.pool, layer, [(first, [3, 0, 7]), (second, [11])])
            assert_same(channel.receive_partial(layer), expected)
    assert not creditor.lender.pins.total()
    channel.close()


def test_parts_of_two_places_merge_to_plain_attention(creditor: Creditor) -> None:
    creditor.lender.lend(ME, 1, [4, 2])
    channel = creditor.channel(ME)
    channel.begin_step([part(1, 5)])
    q = new_query(5)
    channel.send_query(1, q)
    remote = channel.receive_partial(1)
    whole = merge([remote, computed(q, creditor.pool, 1, [(5, [9])])])
    out = torch.empty(5, NUM_HEADS * 64)
    ReferenceKernels().finalize(whole, out)

    blocks = creditor.pool[[4, 2, 9], 1].double()
    keys, values = blocks.permute(1, 0, 3, 2, 4).flatten(1, 2)
    exact = attention_reference(q.double(), keys, values, torch.full((5,), 48))
    expected = (exact.acc / exact.sum[..., None]).flatten(1)
    assert torch.allclose(out, expected, atol=1e-5)
    channel.close()


def test_a_query_that_is_a_view_is_sent_right(creditor: Creditor) -> None:
    creditor.lender.lend(ME, 1, [5])
    channel = creditor.channel(ME)
    channel.begin_step([part(1, 4)])
    q = new_query(8)[::2]
    channel.send_query(0, q)
    expected = computed(q.contiguous(), creditor.pool, 0, [(4, [5])])
    assert_same(channel.receive_partial(0), expected)
    channel.close()


def test_a_step_given_up_midway_does_not_confuse_the_next(creditor: Creditor) -> None:
    creditor.lender.lend(ME, 1, [5])
    channel = creditor.channel(ME)
    channel.begin_step([part(1, 2)])
    channel.send_query(0, new_query(2))
    channel.begin_step([part(1, 3)])
    q = new_query(3, seed=9)
    channel.send_query(0, q)
    assert_same(channel.receive_partial(0), computed(q, creditor.pool, 0, [(3, [5])]))
    channel.close()


def test_owners_are_served_side_by_side(creditor: Creditor) -> None:
    owners = [owner_peer(5), owner_peer(6)]
    for owner, blocks in zip(owners, ([1], [2, 3]), strict=True):
        creditor.lender.lend(owner, 1, blocks)
    channels = [creditor.channel(owner) for owner in owners]
    q = new_query(2)
    for channel in channels:
        channel.begin_step([part(1, 2)])
        channel.send_query(0, q)
    for channel, blocks in zip(channels, ([1], [2, 3]), strict=True):
        assert_same(channel.receive_partial(0), computed(q, creditor.pool, 0, [(2, blocks)]))
        channel.close()


def test_an_unknown_part_is_lost(creditor: Creditor) -> None:
    channel = creditor.channel(ME)
    channel.begin_step([part(404, 1)])
    with pytest.raises(PartLost, match=r"instance 2: PART_LOST: no moves"):
        channel.send_query(0, new_query(1))
        channel.receive_partial(0)
    with pytest.raises(PartLost, match="closed"):
        channel.begin_step([part(404, 1)])


def test_the_parts_of_another_owner_are_not_given(creditor: Creditor) -> None:
    creditor.lender.lend(owner_peer(9), 1, [3])
    channel = creditor.channel(ME)
    channel.begin_step([part(1, 1)])
    with pytest.raises(PartLost):
        channel.send_query(0, new_query(1))
        channel.receive_partial(0)


def test_a_lease_that_ends_between_layers_is_noticed(creditor: Creditor) -> None:
    creditor.lender.lend(ME, 1, [3])
    creditor.lender.lend(ME, 2, [8])
    channel = creditor.channel(ME)
    channel.begin_step([part(1, 1), part(2, 1)])
    channel.send_query(0, new_query(2))
    channel.receive_partial(0)
    creditor.lender.gone.add(8)
    channel.send_query(1, new_query(2))
    with pytest.raises(PartLost, match="the lease ended"):
        channel.receive_partial(1)
    assert not creditor.lender.pins.total()


def test_misuse_is_told_and_harms_nothing(creditor: Creditor) -> None:
    creditor.lender.lend(ME, 1, [3])
    channel = creditor.channel(ME)
    with pytest.raises(InternalError, match="rows in a step"):
        channel.begin_step([part(1, MAX_ROWS + 1)])
    channel.begin_step([part(1, 2)])
    for q in (new_query(3), new_query(2).double()):
        with pytest.raises(InternalError, match="not float32"):
            channel.send_query(0, q)
    q = new_query(2)
    channel.send_query(0, q)
    with pytest.raises(InternalError, match="not received"):
        channel.send_query(1, q)
    with pytest.raises(InternalError, match="no query of layer 1"):
        channel.receive_partial(1)
    assert_same(channel.receive_partial(0), computed(q, creditor.pool, 0, [(2, [3])]))
    channel.close()


def test_queries_are_counted(creditor: Creditor) -> None:
    creditor.lender.lend(ME, 1, [3])
    channel = creditor.channel(ME)
    channel.begin_step([part(1, 2)])
    channel.send_query(0, new_query(2))
    channel.receive_partial(0)
    channel.close()
    creditor.server.stop()
    assert creditor.count("remote_queries", "creditor") == 1
    assert creditor.count("remote_query_rows", "creditor") == 2
