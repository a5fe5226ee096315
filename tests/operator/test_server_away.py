"""The API server is away for longer than a lease: nothing is lost, nothing is done twice."""

import asyncio

from tests.operator.conftest import LEASE_S, Place, until
from tests.operator.line import over_a_line


async def test_it_goes_on_when_the_server_is_back(place: Place) -> None:
    async with over_a_line() as (api, line), place.operator(api) as operator:
        await place.create(replicas=2)
        await place.until_serving(2)
        line.cut()
        await place.scale(4)
        await asyncio.sleep(3 * LEASE_S)
        assert len(place.nodes.pods) == 2
        assert not operator.done()
        line.is_cut = False
        await place.until_serving(4)
        await until(lambda: len(place.nodes.pods) == 4)
        assert (await place.reasons()).count("Created") == 4
