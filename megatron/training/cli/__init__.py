"""Flags: their definitions, what they must not be combined with, and the report of what is in effect."""
