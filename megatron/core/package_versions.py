"""Versions of torch and of optional packages."""

from __future__ import annotations

import functools
from importlib import metadata

import torch
from packaging.version import Version

_NONE = Version("0.0.0")


@functools.cache
def _installed(*names: str) -> Version:
    for name in names:
        try:
            return Version(metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    return _NONE


def get_torch_version() -> Version:
    """Return torch's version."""
    return Version(torch.__version__)


def get_te_version() -> Version:
    """Return transformer-engine's version; 0.0.0 where it is not installed."""
    return _installed("transformer-engine", "transformer_engine")


def get_fa_version() -> Version:
    """Return the version of the package flash-attn, which nothing here uses; 0.0.0 where it is not installed."""
    return _installed("flash-attn")


def get_mamba_version() -> Version:
    """Return the version of the package mamba-ssm; 0.0.0 where it is not installed."""
    return _installed("mamba-ssm", "mamba_ssm")


def get_causal_conv1d_version() -> Version:
    """Return the version of the package causal-conv1d; 0.0.0 where it is not installed."""
    return _installed("causal-conv1d", "causal_conv1d")


def get_emerging_optimizers_version() -> Version:
    """Return the version of the package emerging-optimizers; 0.0.0 where it is not installed."""
    return _installed("emerging-optimizers", "emerging_optimizers")


def get_flashinfer_version() -> Version | None:
    """Return the version of the package flashinfer; None where it is not installed."""
    found = _installed("flashinfer-python", "flashinfer")
    return None if found == _NONE else found


def _is_min(found: Version, version: str, check_equality: bool) -> bool:
    return found >= Version(version) if check_equality else found > Version(version)


def is_torch_min_version(version: str, check_equality: bool = True) -> bool:
    """Return whether torch is of this version or a later one; without ``check_equality`` of a later one."""
    return _is_min(get_torch_version(), version, check_equality)


def is_te_min_version(version: str, check_equality: bool = True) -> bool:
    """Return whether transformer-engine is of this version or a later one; as ``is_torch_min_version``."""
    return _is_min(get_te_version(), version, check_equality)


def is_fa_min_version(version: str, check_equality: bool = True) -> bool:
    """Return whether flash-attn is of this version or a later one; as ``is_torch_min_version``."""
    return _is_min(get_fa_version(), version, check_equality)


def is_mamba_min_version(version: str, check_equality: bool = True) -> bool:
    """Return whether mamba-ssm is of this version or a later one; as ``is_torch_min_version``."""
    return _is_min(get_mamba_version(), version, check_equality)


def is_causal_conv1d_min_version(version: str, check_equality: bool = True) -> bool:
    """Return whether causal-conv1d is of this version or a later one; as ``is_torch_min_version``."""
    return _is_min(get_causal_conv1d_version(), version, check_equality)


def is_emerging_optimizers_min_version(version: str, check_equality: bool = True) -> bool:
    """Return whether emerging-optimizers is of this version or a later one; as ``is_torch_min_version``."""
    return _is_min(get_emerging_optimizers_version(), version, check_equality)


def is_flashinfer_min_version(version: str, check_equality: bool = True) -> bool:
    """Return whether flashinfer is of this version or a later one; as ``is_torch_min_version``."""
    return _is_min(get_flashinfer_version() or _NONE, version, check_equality)
