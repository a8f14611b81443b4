"""Megatron-Core's configuration and process groups, turned into ``fully_shard`` calls."""
