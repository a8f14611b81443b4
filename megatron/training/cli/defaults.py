"""Defaults that differ from Megatron-LM's: one table, which a test compares with both parsers and the documentation shows."""

from __future__ import annotations

import argparse
from typing import Any

from megatron.training.cli.upstream_flags import UpstreamFlag

DEFAULTS_THAT_DIFFER: dict[str, str] = {
    "--distributed-backend": "`nccl` where there is a GPU, `gloo` elsewhere",
    "--verify-integrity": "always so: files are compared with their checksums when they are loaded",
    "--ckpt-format": "ours: PyTorch DCP directories, which any number of ranks can load",
    "--dist-ckpt-strictness": "`raise_all`: missing, extra and mis-shaped keys are errors",
    "--rerun-mode": "`disabled`: no step is run twice",
}
"""Flag: what holds here where it is not given."""


def default_differs(own: Any, action: argparse.Action, upstream: UpstreamFlag) -> bool:
    """Whether a setting that is not given means another thing than in Megatron-LM."""
    if action.nargs == 0 and upstream.nargs == 0:
        return bool((own == action.const) != (upstream.default == _const(action, upstream)))
    return bool(own != upstream.default) and not (own in (None, "") and upstream.default in (None, ""))


def _const(action: argparse.Action, upstream: UpstreamFlag) -> Any:
    """Return what Megatron-LM's switch sets."""
    return action.const if isinstance(upstream.default, str) else upstream.default is not True
