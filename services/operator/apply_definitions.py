"""`python -m services.operator.apply_definitions FOLDER`: brings resource definitions up to date.

Helm installs those of a chart once and never again; the chart runs this before each upgrade.
"""

import asyncio
import os
import sys
from pathlib import Path

import yaml

from services.common.errors import ConfigError
from services.common.lifecycle import run
from services.operator import paths
from services.operator.api import Api, connect, kubeconfig_of

_MANAGER = "infinite-llm"


async def apply_definitions(api: Api, folder: Path) -> list[str]:
    """Their names."""
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise ConfigError(f"{folder} holds no definitions")
    names = []
    for file in files:
        definition = yaml.safe_load(file.read_text())
        name = definition["metadata"]["name"]
        await api.apply(paths.definition(name), definition, _MANAGER)
        names.append(name)
    return names


async def _main(_: asyncio.Event) -> None:
    if len(sys.argv) != 2:
        raise ConfigError("usage: python -m services.operator.apply_definitions FOLDER")
    api = await connect(kubeconfig_of(os.environ))
    try:
        for name in await apply_definitions(api, Path(sys.argv[1])):
            print(f"applied {name}")
    finally:
        await api.close()


if __name__ == "__main__":
    sys.exit(run(_main))
