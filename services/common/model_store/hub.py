"""Models by hub id, through huggingface_hub and its own cache, so that nothing is fetched twice."""

from collections.abc import Callable
from pathlib import Path

from services.common.errors import ConfigError
from services.common.model_store.folder import check_folder

#: Safetensors only: pickled weights could run code on loading.
_TEXT_PATTERNS = ["*.json", "*.jinja"]
_WEIGHT_PATTERNS = ["*.safetensors"]
_METADATA_TIMEOUT_S = 5.0


def fetch(name: str, progress: Callable[[str], None], with_weights: bool) -> Path:
    from httpx2 import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    patterns = _TEXT_PATTERNS + _WEIGHT_PATTERNS if with_weights else _TEXT_PATTERNS
    progress(f"looking up {name} on the model hub")
    try:
        folder = snapshot_download(name, allow_patterns=patterns, etag_timeout=_METADATA_TIMEOUT_S)
    except GatedRepoError as error:
        raise ConfigError(f"model {name!r}: the hub wants a login and its licence") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(f"model {name!r}: no such local folder and no such hub id") from error
    except HFValidationError as error:
        raise ConfigError(f"model {name!r}: not a folder, not a valid hub id") from error
    except (HTTPError, OfflineModeIsEnabled, OSError) as error:
        raise ConfigError(
            f"model {name!r}: no such local folder, and the hub cannot be reached"
        ) from error
    return check_folder(Path(folder), with_weights)
