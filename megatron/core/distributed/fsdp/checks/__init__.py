"""Checks across ranks, and the debug mode: an observer of the core, which runs without it."""
