"""Megatron-FSDP's import paths; the names are in ``compat``."""
