"""Megatron-FSDP's import paths; ``import_paths.py`` has the names of each."""
