"""The Worker service: what it refuses, and that nothing is left behind."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from protos.infinite_llm.v1 import types_pb2, worker_pb2
from services.common.errors import (
    ContextLengthExceeded,
    InfiniteLLMError,
    InternalError,
    InvalidRequest,
    Unavailable,
)
from services.common.ids import ReqId
from services.common.rpc import error_from_rpc
from services.worker.engine.sequence import Schedule
from tests.unit.worker.rmanager.rig import Instance, eventually

NAN = float("nan")


@pytest.fixture
async def instance(tmp_path: Path) -> AsyncIterator[Instance]:
    async with Instance(1, tmp_path, num_blocks=8, lease_s=1.0) as instance:
        yield instance


async def error_of(instance: Instance, **fields: object) -> InfiniteLLMError:
    values = {"req_id": 1, "prompt_token_ids": [5, 6], "max_tokens": 3} | fields
    channel, stub = instance.stub()
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            request = worker_pb2.GenerateTokensRequest(**values)  # type: ignore[arg-type]
            async for _ in stub.Generate(request, timeout=10):
                pass
    return error_from_rpc(caught.value)


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"prompt_token_ids": []}, InvalidRequest, "prompt"),
        ({"prompt_token_ids": [1000]}, InvalidRequest, "prompt"),
        ({"max_tokens": 0}, InvalidRequest, "max_tokens"),
        ({"arrived_at_s": NAN}, InvalidRequest, "arrived_at_s"),
        ({"sampling": types_pb2.SamplingParams(temperature=-1)}, InvalidRequest, "temperature"),
        ({"sampling": types_pb2.SamplingParams(top_p=1.5)}, InvalidRequest, "top_p"),
        ({"sampling": types_pb2.SamplingParams(min_p=NAN)}, InvalidRequest, "min_p"),
        ({"sampling": types_pb2.SamplingParams(seed=1, logprobs=21)}, InvalidRequest, "logprobs"),
        (
            {"sampling": types_pb2.SamplingParams(logit_bias={1000: 1.0})},
            InvalidRequest,
            "logit_bias",
        ),
        ({"sampling": types_pb2.SamplingParams(min_tokens=4)}, InvalidRequest, "min_tokens"),
        ({"stop_token_ids": [5, 1000]}, InvalidRequest, "stop_token_ids"),
        ({"max_tokens": 31}, ContextLengthExceeded, "max_tokens"),
        ({"prompt_token_ids": [5] * 32}, ContextLengthExceeded, "prompt"),
        ({"grammar": "start: nowhere"}, InvalidRequest, "grammar"),
        ({"grammar": 'start: "a"', "ignore_eos": True}, InvalidRequest, "ignore_eos"),
        ({"output_token_ids": [1000]}, InvalidRequest, "output_token_ids"),
        ({"output_token_ids": [5, 6, 7]}, InvalidRequest, "output_token_ids"),
        ({"output_token_ids": [5, 2]}, InvalidRequest, "output_token_ids"),
        ({"output_token_ids": [5], "stop_token_ids": [5]}, InvalidRequest, "output_token_ids"),
        (
            {"output_token_ids": [5], "sampling": types_pb2.SamplingParams(temperature=1.0)},
            InvalidRequest,
            "seed",
        ),
    ],
)
async def test_bad_requests_are_refused_and_the_next_one_works(
    instance: Instance, fields: dict[str, object], kind: type[InfiniteLLMError], param: str
) -> None:
    error = await error_of(instance, **fields)
    assert type(error) is kind
    assert error.param == param
    assert await instance.generate(num_prompt=3, max_tokens=2) == [7, 7]


async def test_whatever_sampling_is_asked_for_is_answered_or_refused_by_name(
    instance: Instance,
) -> None:
    random = Random(3)
    numbers = [-1.0, -0.0, 0.0, 1e-320, 0.5, 1.0, 1.7, 2.5, 1e300, NAN, math.inf, -math.inf]
    counts = [0, 1, 3, 20, 21, 2**31, 2**32 - 1]
    fields = types_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    channel, stub = instance.stub()
    num_refused = 0
    async with channel:
        for req_id in range(1, 80):
            names = random.sample(sorted(fields), 3)
            values: dict[str, Any] = {
                name: random.choice(
                    numbers if fields[name].cpp_type == fields[name].CPPTYPE_DOUBLE else counts
                )
                for name in names
                if name != "logit_bias"
            }
            bias = {random.choice([0, 5, 10**6]): random.choice(numbers)}
            values |= {"logit_bias": bias} if "logit_bias" in names else {}
            request = worker_pb2.GenerateTokensRequest(
                req_id=req_id,
                prompt_token_ids=[5, 6],
                max_tokens=3,
                sampling=types_pb2.SamplingParams(**values),
            )
            try:
                answers = [answer async for answer in stub.Generate(request, timeout=10)]
                assert answers[-1].finish_reason == worker_pb2.FINISH_REASON_LENGTH
            except grpc.aio.AioRpcError as caught:
                error = error_from_rpc(caught)
                assert isinstance(error, InvalidRequest), error
                assert error.param in values
                num_refused += 1
    assert 20 < num_refused < 75
    assert instance.pool.num_free == 8


async def test_a_request_may_use_what_all_instances_have(
    instance: Instance, tmp_path: Path
) -> None:
    async with Instance(2, tmp_path, num_blocks=8, lease_s=1.0) as creditor:
        instance.meet(creditor)
        assert len(await instance.generate(num_prompt=30, max_tokens=20)) == 20


async def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(instance: Instance) -> None:
    instance.runner.error = ValueError("broken")
    assert isinstance(await error_of(instance), InternalError)
    instance.runner.error = None
    assert await instance.generate(num_prompt=3, max_tokens=2) == [7, 7]
    assert instance.pool.num_free == 8


async def test_the_same_request_twice_at_once_is_refused(instance: Instance) -> None:
    instance.runner.step_s = 0.05
    first = asyncio.create_task(instance.generate(num_prompt=3, max_tokens=10))
    await eventually(lambda: instance.engine.snapshot.num_running == 1)
    assert isinstance(await error_of(instance), InvalidRequest)
    assert len(await first) == 10


async def test_abort_ends_the_stream_and_is_idempotent(instance: Instance) -> None:
    instance.runner.step_s = 0.05
    answer = asyncio.create_task(instance.generate(num_prompt=3, max_tokens=25))
    await eventually(lambda: instance.engine.snapshot.num_running == 1)
    channel, stub = instance.stub()
    async with channel:
        for _ in range(2):
            await stub.Abort(worker_pb2.AbortRequest(req_id=1), timeout=5)
    assert len(await answer) < 25
    await eventually(lambda: instance.pool.num_free == 8)


@pytest.fixture
def may_step(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No step ends before this is set."""
    run, event = instance.runner.run, threading.Event()

    def run_held(plan: Schedule) -> dict[ReqId, int]:
        assert event.wait(10.0)
        return run(plan)

    monkeypatch.setattr(instance.runner, "run", run_held)
    return event


@pytest.mark.parametrize("is_aborted", [False, True])
async def test_what_comes_for_a_caller_who_left_is_not_given_to_the_next(
    instance: Instance, may_step: threading.Event, is_aborted: bool
) -> None:
    left = asyncio.create_task(instance.generate(num_prompt=3, max_tokens=10))
    await eventually(lambda: instance.pool.num_free < 8)  # a step is under way
    abort = instance.worker.Abort(worker_pb2.AbortRequest(req_id=1 if is_aborted else 9), Mock())
    aborting = asyncio.create_task(abort)
    await asyncio.sleep(0)
    left.cancel()
    await eventually(lambda: instance.streams.num_open == 0)
    answer = asyncio.create_task(instance.generate(num_prompt=3, max_tokens=2))
    await eventually(lambda: instance.streams.num_open == 1)
    may_step.set()
    assert await answer == [7, 7]
    await aborting


async def test_a_draining_instance_takes_nothing_new(instance: Instance) -> None:
    instance.rmanager.begin_drain()
    assert isinstance(await error_of(instance), Unavailable)


async def test_stopping_tells_everybody_who_waits(instance: Instance) -> None:
    instance.runner.step_s = 0.05
    failed = asyncio.create_task(error_of(instance, max_tokens=25))
    await eventually(lambda: instance.engine.snapshot.num_running == 1)
    await asyncio.to_thread(instance.engine.stop)
    assert isinstance(await failed, Unavailable)
    assert instance.pool.num_free == 8
