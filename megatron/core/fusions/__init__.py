"""Functions that one kernel computes."""
