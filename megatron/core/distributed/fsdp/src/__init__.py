"""Megatron-FSDP's import paths; ``version1.py`` and ``version2.py`` collect the names."""
