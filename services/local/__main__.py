"""`python -m services.local up|demo|status`: the whole cluster on one machine."""

import argparse
import asyncio
import os
import re
import sys
from typing import NoReturn

from rich.console import Console

from services.common.lifecycle import EXIT_CONFIG, EXIT_FAILURE, EXIT_OK, run, until_stopped
from services.common.model_store import DEFAULT_MODEL
from services.local.demo import Report, demo
from services.local.options import (
    DEFAULT_INSTANCES,
    DEFAULT_KV_BLOCKS,
    DEFAULT_PORT,
    DTYPES,
    Options,
)
from services.local.status import find_gmanager, show_decisions, status
from services.local.terminal import own_foreground
from services.local.up import up

# Where nobody says how wide the output is.
_PLAIN_WIDTH = 100


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line: the usage would bury it, and most callers type `make`."""
        self.exit(EXIT_CONFIG, f"{message}\n")


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = _Parser(prog="python -m services.local", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("up", "start a cluster, send it one long prompt, serve until Ctrl-C"),
        ("demo", "check a pooled cluster against one big instance; one JSON object at the end"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--model", default=DEFAULT_MODEL, help="name, folder or hub id")
        command.add_argument("--instances", type=_number, default=DEFAULT_INSTANCES)
        command.add_argument(
            "--gmanagers", type=_number, default=1, help="one leads, others stand by"
        )
        command.add_argument("--kv-blocks", type=_number, default=DEFAULT_KV_BLOCKS)
        command.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the weights")
        command.add_argument("--max-new-tokens", type=_number, default=48)
        command.add_argument(
            "--move-tokens-per-step", type=_number, default=16, help="pace of planned moves"
        )
        command.add_argument(
            "--pooling", choices=("on", "off"), default="on", help="off: every instance is alone"
        )
        command.add_argument("--otlp-endpoint", default="", help="where traces go, host:port")
    up_command = commands.choices["up"]
    up_command.add_argument("--port", type=_number, default=DEFAULT_PORT, help="HTTP; gRPC is next")
    up_command.add_argument("--no-prompt", action="store_true", help="only serve")
    status_command = commands.add_parser("status", help="draw the Request Placement Map")
    status_command.add_argument(
        "--port", type=_number, default=DEFAULT_PORT, help="the cluster's HTTP"
    )
    status_command.add_argument("--gmanager", help="host:port of any gManager instead, or several")
    status_command.add_argument("--watch", action="store_true")
    status_command.add_argument(
        "--decisions", action="store_true", help="why blocks were moved, or were not"
    )
    status_command.add_argument(
        "--request",
        type=_request,
        metavar="ID",
        help="only decisions about this one",
    )
    return parser.parse_args(arguments)


def _request(text: str) -> int:
    """Up to 16 hexadecimal digits, as decisions are drawn with it."""
    if not re.fullmatch("[0-9a-fA-F]{1,16}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the id of a request")
    return int(text, 16)


def _options(arguments: argparse.Namespace) -> Options:
    return Options(
        model=arguments.model,
        instances=arguments.instances,
        gmanagers=arguments.gmanagers,
        kv_blocks=arguments.kv_blocks,
        dtype=arguments.dtype,
        max_new_tokens=arguments.max_new_tokens,
        move_tokens_per_step=arguments.move_tokens_per_step,
        pooling=arguments.pooling == "on",
        otlp_endpoint=arguments.otlp_endpoint,
        environ=os.environ,
    )


def main(arguments: argparse.Namespace) -> int:
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    reports: list[Report] = []

    async def command(stop: asyncio.Event) -> None:
        match arguments.command:
            case "up":
                with_prompt = not arguments.no_prompt
                await up(_options(arguments), arguments.port, with_prompt, console, stop)
            case "demo":
                report = await until_stopped(demo(_options(arguments), console), stop)
                reports.extend([report] if report else [])
            case "status":
                address = arguments.gmanager or find_gmanager(arguments.port)
                if arguments.decisions or arguments.request is not None:
                    await show_decisions(address, arguments.request, console)
                else:
                    await status(address, arguments.watch, console, stop)

    with own_foreground():
        exit_status = run(command)
    if exit_status or arguments.command != "demo":
        return exit_status
    for report in reports:
        print(report.to_json())
    return EXIT_OK if reports and reports[0].is_good else EXIT_FAILURE


if __name__ == "__main__":
    sys.exit(main(_parse(sys.argv[1:])))
