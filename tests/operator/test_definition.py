"""The definition on the real API server: what it fills in, what it refuses, what scales."""

from typing import Any

import pytest

from services.operator.api import ApiError
from tests.operator.conftest import NAME, Place


async def test_defaults_are_filled_in(place: Place) -> None:
    await place.create()
    spec = (await place.read())["spec"]
    assert (spec["replicas"], spec["drainTimeoutSeconds"]) == (1, 60)
    assert spec["engine"]["kvBlocks"] == 1024
    assert spec["pooling"]["enabled"] is True
    assert spec["updateStrategy"] == {"maxUnavailable": 1}


async def test_a_new_resource_is_not_taken_for_ready(place: Place) -> None:
    await place.create()
    assert (await place.condition("Ready"))["status"] == "Unknown"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"replicas": -1}, "greater than or equal to 0"),
        ({"model": ""}, "at least 1 chars"),
        ({"engine": {"blockSize": 17}}, "supported values"),
        ({"engine": {"dtype": "int3"}}, "supported values"),
        ({"engine": {"kvBlocks": 4}, "pooling": {"lendKeepFree": 4}}, "below engine.kvBlocks"),
        ({"updateStrategy": {"maxUnavailable": 0}}, "at least 1"),
        ({"updateStrategy": {"maxUnavailable": "101%"}}, "at least 1"),
        ({"resources": {"limits": {"cpu": "much"}}}, "should match"),
        ({"pooling": {"maxLentShare": 1.5}}, "less than or equal to 1"),
    ],
    ids=str,
)
async def test_what_makes_no_sense_is_refused(
    place: Place, spec: dict[str, Any], message: str
) -> None:
    with pytest.raises(ApiError) as caught:
        await place.create(**spec)
    assert caught.value.status == 422
    assert message in caught.value.message


@pytest.mark.parametrize("name", ["a.b", "x" * 49])
async def test_a_name_must_fit_into_its_pods_names(place: Place, name: str) -> None:
    with pytest.raises(ApiError) as caught:
        await place.create(name)
    assert "pods are named after it" in caught.value.message


async def test_scaling_writes_the_number_and_is_checked(place: Place) -> None:
    await place.create(replicas=2)
    await place.scale(5)
    scale = await place.api.get(f"{place.path()}/scale")
    assert scale["spec"]["replicas"] == 5
    with pytest.raises(ApiError) as caught:
        await place.scale(-1)
    assert caught.value.status == 422


async def test_the_status_is_not_the_users(place: Place) -> None:
    await place.create()
    await place.api.patch(place.path(NAME), {"status": {"replicas": 9}})
    assert (await place.status()).get("replicas") != 9
