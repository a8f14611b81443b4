"""Data parallelism in its forms."""
