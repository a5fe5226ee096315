"""`python -m services.router.grammars FOLDER`: tells of grammars on stdin whether they compile.

A process of its own, since a grammar is a client's program: it may take any time, any memory, or
the whole stack, and then only this process ends. Started by GrammarChecks; a JSON object a line.
"""

import json
import resource
import sys
import threading
from pathlib import Path

from services.common.errors import InvalidRequest
from services.common.grammars import GrammarCompiler

#: The vocabulary takes 50 to 200 MB, a grammar less. Both fit beside a router in 1 GiB.
_MAX_MEMORY_BYTES = 512 * 1024**2
#: A quarter of what threads of workers have, so that what passes here passes there.
_STACK_BYTES = 2 * 1024**2


def _serve(folder: Path) -> None:
    try:
        compiler = GrammarCompiler.load(folder)
    except InvalidRequest as error:
        _say(0, error.message)
        return
    _say(0, None)
    for line in sys.stdin:
        question = json.loads(line)
        _say(question["number"], _fault(compiler, question["grammar"]))


def _fault(compiler: GrammarCompiler, grammar: str) -> str | None:
    try:
        compiler.compile(grammar)
    except InvalidRequest as error:
        return error.message
    return None


def _say(number: int, fault: str | None) -> None:
    print(json.dumps({"number": number, "fault": fault}), flush=True)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Where memory runs out all the same, the router is not the one that goes.
    Path("/proc/self/oom_score_adj").write_text("1000")
    threading.stack_size(_STACK_BYTES)
    serving = threading.Thread(target=_serve, args=[Path(sys.argv[1])])
    serving.start()
    serving.join()
