"""`up`: start a cluster, show it at work on one long prompt, and stay until stopped."""

import asyncio
from dataclasses import replace

from rich.console import Console

from services.common.errors import InfiniteLLMError
from services.common.lifecycle import until_stopped
from services.local.cluster import LocalCluster
from services.local.console import line_writer
from services.local.options import Options
from services.local.plan import HOST
from services.local.preflight import check_ports, find_redis_server
from services.local.progress import Progress
from services.local.prompt import build_request
from services.local.screen import show_request
from services.local.watchdog import BackOff, watch


async def up(
    options: Options, http_port: int, with_prompt: bool, console: Console, stop: asyncio.Event
) -> None:
    """Returns once `stop` is set and everything has ended."""
    check_ports(http_port)
    find_redis_server(options.environ)
    progress = Progress(line_writer(console))
    await until_stopped(_serve(options, http_port, with_prompt, console, progress), stop)
    progress.say("everything has stopped")


async def _serve(
    options: Options, http_port: int, with_prompt: bool, console: Console, progress: Progress
) -> None:
    async with progress.step("preparing model and kernels"):
        spec = await options.prepare(progress.say)
    spec = replace(spec, http_port=http_port, grpc_port=http_port + 1)
    cluster = options.new_cluster(spec)
    progress.say(f"logs are in {cluster.folder}")
    await cluster.start(progress)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch(cluster, progress.say, BackOff()))
            if with_prompt:
                await _try_prompt(cluster, options.max_new_tokens, console, progress)
            line_writer(console)(_describe_use(cluster))
    finally:
        await cluster.stop(progress.say)


async def _try_prompt(
    cluster: LocalCluster, max_new_tokens: int, console: Console, progress: Progress
) -> None:
    try:
        await show_request(cluster, build_request(cluster.spec, max_new_tokens), console, progress)
    except InfiniteLLMError as error:
        progress.say(f"the prompt failed: {error.message}")


def _describe_use(cluster: LocalCluster) -> str:
    url, name, ports = cluster.http_url, cluster.spec.model_name, cluster.ports
    message = '{"role": "user", "content": "What is the capital of France?"}'
    body = f'{{"model": "{name}", "temperature": 0, "messages": [{message}]}}'
    metrics = [
        url,
        *(f"http://{HOST}:{p}" for p in (*ports.gmanager_metrics, *ports.worker_metrics)),
    ]
    return (
        f"\nServing {name} on {url} (OpenAI) and {cluster.grpc_address} (gRPC). Try\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n"
        f"  make status ARGS=--watch PORT={ports.http}\n"
        f"Metrics of router, gManager and workers: {', '.join(metrics)}, each at /metrics\n"
        "Ctrl-C stops everything.\n"
    )
