"""Megatron-FSDP's import path of what describes the package."""

from megatron.core.distributed.fsdp.src.package_info import (
    MAJOR,
    MINOR,
    PATCH,
    PRE_RELEASE,
    VERSION,
    __description__,
    __keywords__,
    __package_name__,
    __shortversion__,
    __version__,
)

__all__ = [
    "MAJOR",
    "MINOR",
    "PATCH",
    "PRE_RELEASE",
    "VERSION",
    "__description__",
    "__keywords__",
    "__package_name__",
    "__shortversion__",
    "__version__",
]
