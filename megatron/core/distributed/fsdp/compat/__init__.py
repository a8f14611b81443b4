"""Public names of Megatron-FSDP, versions 1 and 2, for its import paths in ``src``: names alone, no logic."""
