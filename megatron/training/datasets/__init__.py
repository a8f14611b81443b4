"""Datasets at Megatron-LM's import path; the code is in ``megatron.core.datasets``."""
