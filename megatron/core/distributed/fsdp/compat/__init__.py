"""Subclasses of the core's group and context with Megatron-FSDP's names, and its ``DBuffer``; ``fsdp2/fully_shard.py`` builds with them."""
