"""Every step says when it begins and when it is done."""

import re

import pytest

from services.local.progress import Progress


async def test_a_step_has_a_beginning_and_an_end() -> None:
    lines: list[str] = []
    progress = Progress(lines.append)
    async with progress.step("starting redis"):
        progress.say("meanwhile")
    assert [re.sub(r"\d+\.\d", "N", line).replace(" ", "") for line in lines] == [
        "[Ns]startingredis...",
        "[Ns]meanwhile",
        "[Ns]startingredis:doneinNs",
    ]


async def test_a_step_that_fails_is_never_done() -> None:
    lines: list[str] = []
    with pytest.raises(ValueError, match="broken"):
        async with Progress(lines.append).step("starting redis"):
            raise ValueError("broken")
    assert len(lines) == 1
