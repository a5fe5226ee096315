"""What the router has from files that others renew while it runs: API keys and its certificate."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeAlias

from services.router.access.key_file import KeyFile
from services.router.config import RouterConfig
from services.router.tls import ServerTls

PERIOD_S = 2.0

_Stamp: TypeAlias = tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class Renewed:
    keys: KeyFile | None
    tls: ServerTls | None

    @classmethod
    def load(cls, config: RouterConfig) -> Self:
        """Raises ConfigError: at the start a file that is wrong is no file to go on with."""
        keys = None if config.api_keys_file is None else KeyFile(config.api_keys_file)
        tls = None
        if config.tls_certificate is not None and config.tls_key is not None:
            tls = ServerTls(config.tls_certificate, config.tls_key)
        return cls(keys, tls)

    async def run(self, period_s: float = PERIOD_S) -> None:
        """Reads again what has changed, until cancelled."""
        sources = [source for source in (self.keys, self.tls) if source is not None]
        # Nothing yet: a file may have changed between the load and now.
        seen: dict[int, list[_Stamp]] = {}
        while sources:
            for number, source in enumerate(sources):
                stamps = await asyncio.to_thread(_stamps, source.paths)
                if stamps != seen.get(number):
                    seen[number] = stamps
                    source.reload()
            await asyncio.sleep(period_s)


def _stamps(paths: Sequence[Path]) -> list[_Stamp]:
    return [_stamp(path) for path in paths]


def _stamp(path: Path) -> _Stamp:
    """A mounted Secret changes by a link that leads elsewhere, which shows as another file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
