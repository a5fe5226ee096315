"""Where models come from: a name in, a local folder of safetensors and tokenizer files out.

Worker, router and `make` resolve the same name here; nothing in this package imports torch.
"""

from services.common.model_store.store import DEFAULT_MODEL, default_cache_dir, resolve

__all__ = ["DEFAULT_MODEL", "default_cache_dir", "resolve"]
