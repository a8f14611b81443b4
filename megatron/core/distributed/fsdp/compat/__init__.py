"""Subclasses of the core's group and context with Megatron-FSDP's names, and its ``DBuffer``; ``sharding.py`` builds with them."""
