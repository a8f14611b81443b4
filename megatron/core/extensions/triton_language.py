"""Triton, which torch's CUDA builds bring with them. Importing this file where it is missing is an ImportError."""

import triton
import triton.language as tl

__all__ = ["tl", "triton"]
