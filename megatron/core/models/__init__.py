"""Models under Megatron-Core's names."""
