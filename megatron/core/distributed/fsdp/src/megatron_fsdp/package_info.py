"""Megatron-FSDP's ``package_info``, with the facts of this package."""

from packaging.version import Version

from megatron.core import __version__

_version = Version(__version__)
MAJOR, MINOR, PATCH = _version.major, _version.minor, _version.micro
PRE_RELEASE = "".join(map(str, _version.pre or ()))
VERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)
__shortversion__ = _version.base_version
__package_name__ = "megatron.core.distributed.fsdp"
__description__ = "Fully sharded data parallelism for PyTorch modules"
__keywords__ = "deep learning, pytorch, fsdp, zero, sharding"

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
