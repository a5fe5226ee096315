"""What a model folder must hold; every way of resolving a name ends in this check."""

from pathlib import Path

from services.common.errors import ConfigError

#: Matrices in the blocks of a GGUF file, uint8 by their Hugging Face names, where it had any; the
#: file's metadata tells their kinds. Beside the float32 weights, which hold them, too.
QUANTIZED_FILE = "quantized/model.safetensors"

REQUIRED_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


def missing_files(folder: Path, with_weights: bool = True) -> list[str]:
    missing = [name for name in REQUIRED_FILES if not (folder / name).is_file()]
    if with_weights and not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    return missing


def check_folder(folder: Path, with_weights: bool = True) -> Path:
    missing = missing_files(folder, with_weights)
    if missing:
        raise ConfigError(f"model folder {str(folder)!r} lacks {', '.join(missing)}")
    return folder.resolve()
