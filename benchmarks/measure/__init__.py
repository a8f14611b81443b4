"""Timing, memory, overlap and host counts of a step."""
