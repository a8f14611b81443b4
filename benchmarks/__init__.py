"""Comparisons with other engines, and measurements of ours: scripts that are started here."""
