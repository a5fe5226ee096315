"""What an instance reports of its load."""

from pathlib import Path

from protos.infinite_llm.v1 import types_pb2
from tests.unit.worker.rmanager.rig import BLOCK, Instance, eventually


async def test_the_waiting_are_reported_one_by_one_in_the_order_of_their_admission(
    tmp_path: Path,
) -> None:
    async with Instance(1, tmp_path, num_blocks=8, lease_s=1.0) as instance:
        await instance.submit(1, num_prompt=7 * BLOCK, max_tokens=3)
        await eventually(lambda: instance.engine.snapshot.num_running == 1)
        instance.runner.step_s = 0.3
        await instance.submit(2, num_prompt=5 * BLOCK, max_tokens=1)
        await instance.submit(3, num_prompt=6 * BLOCK - 1, max_tokens=1)
        await eventually(lambda: instance.engine.snapshot.num_waiting == 2)
        snapshot = instance.engine.snapshot
        # The first new token of a request needs a place, too.
        assert (snapshot.waiting_sizes, snapshot.waiting_blocks) == ((6, 6), 12)
        instance.runner.step_s = 0.0
        await eventually(lambda: instance.pool.num_free == instance.pool.num_blocks)


async def test_steps_that_take_longer_than_measured_change_the_constants(tmp_path: Path) -> None:
    perf = types_pb2.PerfConstants(
        non_attention=[types_pb2.BatchPoint(batch=1, step_s=0.01)], attention_s_per_token=1e-6
    )
    async with Instance(1, tmp_path, num_blocks=64, lease_s=1.0, perf=perf) as instance:
        instance.runner.step_s = 0.015
        await instance.submit(1, num_prompt=4, max_tokens=200)

        def is_learnt() -> bool:
            instance.rmanager.observe()
            return instance.info.perf.non_attention[0].step_s > 0.0125

        await eventually(is_learnt)
