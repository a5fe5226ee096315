"""`python -m services.router`: reads the settings, loads the text side of the model, serves."""

import asyncio
import logging
import os
import sys

import uvloop

from services.common.config import from_env
from services.common.lifecycle import run
from services.common.model_store import default_cache_dir, resolve
from services.common.telemetry import configure_logging, configure_tracing
from services.router.config import RouterConfig
from services.router.router import Router
from services.router.served_model import ServedModel


async def serve(config: RouterConfig, stop: asyncio.Event) -> None:
    configure_logging("router", config.log_level)
    tracing = configure_tracing("router", config.otlp_endpoint)
    progress = logging.getLogger("services.router").info
    cache_dir = default_cache_dir(os.environ)
    folder = await asyncio.to_thread(resolve, config.model, cache_dir, progress, False)
    model = await asyncio.to_thread(ServedModel.load, folder, config.served_name)
    await Router(config, model).serve(stop)
    tracing.shutdown()


if __name__ == "__main__":
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    sys.exit(run(lambda stop: serve(from_env(RouterConfig, os.environ), stop)))
