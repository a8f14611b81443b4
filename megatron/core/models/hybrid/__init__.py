"""Hybrid models: ``GPTModel`` with the layers of a pattern."""
