"""Wakes whoever is concerned when something changes. Nothing is ever decided from what it says.

No resource version is kept: each watch begins with everything that there is, so that none can be
too old, and what was missed meanwhile is seen at once. Run by `controller`.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping

from services.operator.api import Api, ApiError
from services.operator.resource import Object

_log = logging.getLogger(__name__)

_SHORTEST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


async def watch(
    api: Api, path: str, selector: Mapping[str, str] | None, on_change: Callable[[Object], None]
) -> None:
    """Until cancelled."""
    pause_s = _SHORTEST_PAUSE_S
    while True:
        try:
            async for changed in api.watch(path, selector):
                pause_s = _SHORTEST_PAUSE_S
                on_change(changed)
        except ApiError as error:
            _log.info("a watch ended", extra={"path": path, "reason": error.message})
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
