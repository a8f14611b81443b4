"""Triton, which torch's CUDA builds bring with them. Importing this file without it raises ImportError."""

import triton
import triton.language as tl

__all__ = ["tl", "triton"]
