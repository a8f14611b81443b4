"""Checks of units, of their memory and across ranks, and the debug mode: an observer of the core, which runs without it."""
