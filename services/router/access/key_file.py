"""The keys that are good now, from a file that may change at any time. Asked by both doors."""

import logging
from pathlib import Path

from services.common.errors import ConfigError, Unauthenticated
from services.router.access.account import Account
from services.router.access.keys import ApiKey, find_key, parse_keys

_log = logging.getLogger(__name__)
_SCHEME = "bearer "


class KeyFile:
    """Owner of the accounts: one for each key, for as long as the key is in the file."""

    def __init__(self, path: Path) -> None:
        self.paths = (path,)
        self._keys: tuple[ApiKey, ...] = ()
        self._accounts: dict[bytes, Account] = {}
        self._read()

    def account_of(self, authorization: str | None) -> Account:
        """Of the header's value; raises Unauthenticated."""
        if not authorization:
            raise Unauthenticated("an API key is required: Authorization: Bearer KEY")
        if not authorization[: len(_SCHEME)].lower() == _SCHEME:
            raise Unauthenticated("the Authorization header must be Bearer and an API key")
        key = find_key(self._keys, authorization[len(_SCHEME) :].strip())
        if key is None:
            raise Unauthenticated("the API key is not known here")
        return self._accounts[key.digest]

    def reload(self) -> None:
        """When the file has changed. A file that is wrong changes nothing."""
        before = self._keys
        try:
            self._read()
        except ConfigError as error:
            _log.error("API keys not reloaded", extra={"reason": error.message})
        if self._keys != before:
            _log.info("API keys reloaded", extra={"num_keys": len(self._keys)})

    def _read(self) -> None:
        (path,) = self.paths
        name = f"INFINITE_LLM_API_KEYS_FILE: {path}"
        try:
            keys = parse_keys(path.read_text("utf-8"))
        except ConfigError as error:
            raise ConfigError(f"{name}: {error.message}") from None
        except (OSError, UnicodeDecodeError) as error:
            # What a decoder says would repeat what is in the file.
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ConfigError(f"{name}: {reason}") from None
        self._keys = keys
        self._accounts = {key.digest: self._account(key) for key in keys}

    def _account(self, key: ApiKey) -> Account:
        account = self._accounts.get(key.digest)
        if account is None:
            return Account(key.name, key.limits)
        account.name = key.name
        account.limit(key.limits)
        return account
