"""Flags: their definitions, refused combinations, and the report of the settings in effect."""
