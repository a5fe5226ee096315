"""Whether a grammar can be enforced, found out before its request takes anybody's place.

Used by generation. Compiling happens in a process of its own, which is ended when it takes too long
and started again for the next grammar; the worker then compiles only what has passed here.
"""

import asyncio
import contextlib
import json
import sys
from collections import OrderedDict
from hashlib import sha256
from pathlib import Path

from services.common.errors import InternalError, InvalidRequest, Overloaded
from services.router.grammars.output_grammar import OutputGrammar

#: For one grammar; usual ones take milliseconds.
COMPILE_DEADLINE_S = 3.0
#: For all that are in front, too.
QUEUE_DEADLINE_S = 15.0
#: To load the vocabulary.
START_DEADLINE_S = 60.0
_MAX_KNOWN = 1024
_MAX_LINE_BYTES = 1024 * 1024


class GrammarChecks:
    """Owner of the process, and of what is known of grammars that were seen before."""

    def __init__(self, folder: Path, compile_deadline_s: float = COMPILE_DEADLINE_S) -> None:
        self._folder = folder
        self._compile_deadline_s = compile_deadline_s
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._number = 0
        self._faults: OrderedDict[bytes, str | None] = OrderedDict()

    async def check(self, grammar: OutputGrammar) -> None:
        """Raises InvalidRequest, which names the field that the grammar came from."""
        key = sha256(grammar.text.encode()).digest()
        if key not in self._faults:
            try:
                async with asyncio.timeout(QUEUE_DEADLINE_S), self._turn:
                    if key not in self._faults:
                        self._keep(key, await self._fault(grammar.text))
            except TimeoutError:
                raise Overloaded("too many grammars are waiting to be checked") from None
        self._faults.move_to_end(key)
        fault = self._faults[key]
        if fault is not None:
            raise InvalidRequest(f"{grammar.param}: {fault}", param=grammar.param)

    def _keep(self, key: bytes, fault: str | None) -> None:
        self._faults[key] = fault
        if len(self._faults) > _MAX_KNOWN:
            self._faults.popitem(last=False)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _fault(self, text: str) -> str | None:
        process = self._process or await self._start()
        self._number += 1
        try:
            async with asyncio.timeout(self._compile_deadline_s):
                return await self._ask(process, {"number": self._number, "grammar": text})
        except TimeoutError:
            await self.close()
            return "takes too long to compile"
        except (EOFError, ConnectionError):
            await self.close()
            return "takes too much memory to compile, or is nested too deeply"

    async def _start(self) -> asyncio.subprocess.Process:
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __package__,
            str(self._folder),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
            start_new_session=True,  # signals of a terminal are for the router
        )
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                fault = await _answer(process, 0)
        except BaseException as error:
            await self.close()
            if isinstance(error, EOFError):
                raise InternalError("the process that checks grammars does not start") from None
            raise
        if fault is not None:
            await self.close()
            raise InvalidRequest(fault, param="grammar")
        return process

    async def _ask(
        self, process: asyncio.subprocess.Process, question: dict[str, int | str]
    ) -> str | None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(question).encode() + b"\n")
        await process.stdin.drain()
        return await _answer(process, self._number)


async def _answer(process: asyncio.subprocess.Process, number: int) -> str | None:
    """Passes over answers to those who have left meanwhile."""
    assert process.stdout is not None
    while True:
        line = await process.stdout.readline()
        if not line:
            raise EOFError
        answer = json.loads(line)
        if answer["number"] == number:
            fault: str | None = answer["fault"]
            return fault
