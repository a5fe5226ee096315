"""What the transports of the data plane cost, each against the Unix socket.

`make bench B=transport`: two processes; the messages of one layer of a decode step there and back,
and whole blocks, checksums included. The transports take turns, so that what else the machine does
meets all of them; the ratios are medians of the turns.
"""

import multiprocessing
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import trustme
from isal.isal_zlib import crc32

from benchmarks.certificates import issue
from benchmarks.command import new_parser, run
from benchmarks.report import Report
from services.worker.distattention.transport.interface import Stream
from services.worker.distattention.transport.opening import Transport
from services.worker.distattention.transport.tls import TlsFiles
from services.worker.distattention.wire import Geometry, Head, Kind, KvDtype

_ROWS = (1, 8, 32)
#: Of the built-in model: 16 tokens in 16 bits, in blocks of half and of all layers.
_BLOCK_BYTES = (184_320, 368_640)
_GEOMETRY = Geometry(30, 9, 3, 64, 16, KvDtype.FLOAT16)
_BASE = "unix"
_DEADLINE_S = 10.0
_WINDOW_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    num_turns: int
    num_trips: int
    num_blocks: int


def serve(address: str, tls: TlsFiles | None, told: Connection) -> None:
    """The creditor's process: answers queries, verifies and acknowledges blocks, until hung up."""
    listener = Transport(tls).listen(address, _DEADLINE_S)
    told.send(listener.address)
    stream = listener.accept()
    room = memoryview(bytearray(1 << 20))
    answer = memoryview(bytes(_GEOMETRY.partial_bytes(max(_ROWS))))
    try:
        while True:
            head = stream.receive_head(may_idle=True)
            payload = room[: head.payload_bytes]
            stream.receive_into(payload)
            if head.kind is Kind.QUERY:
                num_bytes = _GEOMETRY.partial_bytes(head.detail)
                stream.send(Head(Kind.PARTIAL, 0, head.detail), answer[:num_bytes])
            else:
                is_intact = crc32(payload) == head.detail
                stream.send(Head(Kind.ACK, int(is_intact)))
    except ConnectionError:
        listener.close()


def round_trip_s(stream: Stream, num_rows: int, num_trips: int) -> float:
    """The median of many."""
    query = memoryview(bytes(_GEOMETRY.query_bytes(num_rows)))
    into = memoryview(bytearray(_GEOMETRY.partial_bytes(num_rows)))
    times = []
    for _ in range(num_trips):
        started = time.perf_counter()
        stream.send(Head(Kind.QUERY, 0, num_rows), query)
        stream.receive_head()
        stream.receive_into(into)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def block_bytes_per_s(stream: Stream, block_bytes: int, num_blocks: int) -> float:
    """As a move sends them: a few under way, a checksum at both ends."""
    block = memoryview(bytes(block_bytes))
    waiting: deque[int] = deque()
    started = time.perf_counter()
    for index in range(num_blocks):
        if len(waiting) == _WINDOW_BLOCKS:
            stream.receive_head()
            waiting.popleft()
        stream.send(Head(Kind.COPY, index, crc32(block)), block)
        waiting.append(index)
    for _ in waiting:
        stream.receive_head()
    return num_blocks * block_bytes / (time.perf_counter() - started)


@contextmanager
def opened(address: str, tls: TlsFiles | None) -> Iterator[Stream]:
    """A stream to a new process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(address, tls, there), daemon=True)
    process.start()
    stream = Transport(tls).connect(here.recv(), _DEADLINE_S)
    try:
        yield stream
    finally:
        stream.close()
        process.join(_DEADLINE_S)


def measure(streams: dict[str, Stream], sizes: Sizes) -> dict[str, dict[str, list[float]]]:
    """By figure and transport: one value for each turn; in microseconds, or GB/s."""
    figures: dict[str, dict[str, list[float]]] = {}

    def note(figure: str, name: str, value: float) -> None:
        figures.setdefault(figure, {}).setdefault(name, []).append(value)

    for turn in range(sizes.num_turns + 1):
        for name, stream in streams.items():
            for num_rows in _ROWS:
                took_s = round_trip_s(stream, num_rows, sizes.num_trips)
                if turn:  # the first one warms up
                    note(f"round_trip_us_{num_rows}_rows", name, took_s * 1e6)
            for block_bytes in _BLOCK_BYTES:
                rate = block_bytes_per_s(stream, block_bytes, sizes.num_blocks)
                if turn:
                    note(f"gb_per_s_{block_bytes}_bytes", name, rate / 1e9)
    return figures


def over_base(values: dict[str, list[float]], name: str) -> float:
    pairs = zip(values[name], values[_BASE], strict=True)
    return statistics.median(mine / base for mine, base in pairs)


def show(report: Report, figures: dict[str, dict[str, list[float]]]) -> None:
    for figure, values in figures.items():
        rows = [
            [name, f"{statistics.median(each):.2f}", f"{over_base(values, name):.2f}"]
            for name, each in values.items()
        ]
        report.table(figure, ["transport", "median", f"over {_BASE}"], rows)


def main(argv: list[str]) -> None:
    quick = new_parser("transport", __doc__).parse_args(argv).quick
    sizes = Sizes(5, 300, 60) if quick else Sizes(15, 1000, 200)
    report = Report()
    report.machine(1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        tls = issue(trustme.CA(), folder)
        streams = {
            name: stack.enter_context(opened(address, tls if name == "tls" else None))
            for name, address in addresses(folder).items()
        }
        figures = measure(streams, sizes)
    show(report, figures)
    report.last_line(result(figures))


def addresses(folder: Path) -> dict[str, str]:
    return {
        "unix": f"unix:{folder}/unix",
        "tcp": "tcp:127.0.0.1:0",
        "tls": "tls:127.0.0.1:0",
    }


def result(figures: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    return {
        figure: {
            name: {
                "median": round(statistics.median(each), 2),
                "over_unix": round(over_base(values, name), 2),
            }
            for name, each in values.items()
        }
        for figure, values in figures.items()
    }


if __name__ == "__main__":
    sys.exit(run(main))
