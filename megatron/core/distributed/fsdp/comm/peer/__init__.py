"""Copies out of other ranks' memory, on GPUs that reach each other and between CPU processes."""
