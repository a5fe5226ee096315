"""The view of the cluster: what is taken over, what is kept, which channels stay open."""

from typing import Any

from protos.infinite_llm.v1 import gmanager_pb2, types_pb2
from services.router.discovery import Discovery
from services.router.routing import MAX_AGE_S
from services.router.worker_channels import WorkerChannels
from tests.unit.router.cluster import MODEL, FakeWorker, say


class Answering:
    """A gManager that answers from memory."""

    def __init__(self, *views: types_pb2.InstanceView) -> None:
        self.views = views

    async def ask(self, call: Any) -> Any:
        return await call(self)

    async def GetClusterView(self, request: Any, timeout: float) -> Any:
        return gmanager_pb2.GetClusterViewResponse(instances=self.views)


def discovery(*views: types_pb2.InstanceView, pooling: bool = True) -> Discovery:
    gmanagers: Any = Answering(*views)
    return Discovery(gmanagers, MODEL, pooling, clock=lambda: 100.0)


async def test_a_report_is_dated_by_the_routers_clock() -> None:
    view = FakeWorker(7, say(""), address="a:1").view()
    view.age_s = 1.5
    view.load.running, view.load.waiting, view.load.waiting_blocks = 3, 2, 9
    found = discovery(view)
    await found.refresh()
    (instance,) = found.serving
    assert (instance.inst_id, instance.address, instance.reported_at_s) == (7, "a:1", 98.5)
    assert (instance.batch, instance.waiting_blocks, instance.free_blocks) == (5, 9, 64)


async def test_silent_and_draining_instances_are_known_but_not_serving() -> None:
    views = [FakeWorker(inst_id, say("")).view() for inst_id in (1, 2, 3)]
    views[0].age_s = MAX_AGE_S + 1
    views[1].load.draining = True
    found = discovery(*views)
    await found.refresh()
    assert len(found.instances) == 3
    assert [instance.inst_id for instance in found.serving] == [3]


async def test_without_pooling_an_instance_is_as_long_as_its_memory() -> None:
    view = FakeWorker(1, say(""), num_blocks=4, max_model_len=512).view()
    for pooling, expected in [(True, 512), (False, 64)]:
        found = discovery(view, pooling=pooling)
        await found.refresh()
        assert found.instances[0].max_model_len == expected


async def test_channels_close_once_their_instance_left_and_their_calls_ended() -> None:
    channels = WorkerChannels(dead_after_s=6.0)
    with channels.use("127.0.0.1:1") as first:
        await channels.prune(known=set())
        with channels.use("127.0.0.1:1") as again:
            assert again is first
    await channels.prune(known={"127.0.0.1:1"})
    with channels.use("127.0.0.1:1") as kept:
        assert kept is first
    await channels.prune(known=set())
    with channels.use("127.0.0.1:1") as reopened:
        assert reopened is not first
    await channels.close()
