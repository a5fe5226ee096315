"""Chooses the kernels for a device. The worker calls this once, when it starts."""

import logging
from pathlib import Path

import torch

from kernels.decoder import DecoderBuilder, DecoderShape
from kernels.interface import Kernels
from kernels.native.build import BuildError, default_cache_dir
from kernels.native.decoder import NativeDecoderBuilder, supports
from kernels.native.kernels import NativeKernels
from kernels.reference import ReferenceKernels
from kernels.torch_decoder import TorchDecoderBuilder
from kernels.wire import WiredKernels

PROGRAMS_PER_MULTIPROCESSOR = 4

logger = logging.getLogger(__name__)


def select(device: str, num_threads: int, cache_dir: Path | None = None) -> Kernels:
    """`device` is "cpu" or a GPU of torch's ("cuda"). The C++ library is kept in `cache_dir`."""
    kind = device.partition(":")[0]
    if kind == "cuda":
        # triton takes seconds to import and is not there on every platform.
        from kernels.triton_kernels import TritonKernels

        num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        return TritonKernels(PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors)
    if kind != "cpu":
        raise ValueError(f"no kernels for device {device!r}")
    try:
        return NativeKernels(num_threads, cache_dir or default_cache_dir())
    except (BuildError, OSError) as error:
        logger.warning("slow reference kernels are used: %s", error)
        return ReferenceKernels()


def select_decoder(
    kernels: Kernels, shape: DecoderShape, dtype: torch.dtype, device: torch.device
) -> DecoderBuilder:
    """What suits the kernels that attend: their threads compute the layers, too."""
    if isinstance(kernels, NativeKernels) and supports(shape):
        return NativeDecoderBuilder(kernels, shape, dtype)
    return TorchDecoderBuilder(kernels, shape, dtype, device)


def select_wired(kernels: Kernels) -> WiredKernels | None:
    """The kernels that attend, where they can answer over a socket by themselves."""
    return kernels if isinstance(kernels, NativeKernels) else None
