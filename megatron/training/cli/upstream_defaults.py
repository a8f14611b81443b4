"""Flags whose defaults differ from Megatron-LM's; written by ``tools/upstream_defaults.py``: do not edit."""

from __future__ import annotations

# fmt: off
DEFAULTS: dict[str, tuple[object, object, str]] = {
    "--ckpt-format": ('torch_dist', None, 'ours: PyTorch DCP directories, which any number of ranks can load'),
    "--dist-ckpt-strictness": ('assume_ok_unexpected', 'raise_all', 'missing, extra and mis-shaped keys are errors'),
    "--distributed-backend": ('nccl', None, '`nccl` where there is a GPU, `gloo` elsewhere'),
    "--rerun-mode": ('validate_results', 'disabled', 'no step is run twice'),
    "--verify-integrity": (False, True, 'always so: files are compared with their checksums when they are loaded'),
}
"""Flag: (default of Megatron-LM, ours, what it means)."""
