"""Fused functions: one kernel in forward and one in backward."""
