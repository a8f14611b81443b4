"""The entry point for any ``nn.Module``: ``fully_shard``, ``microbatch`` and ``fully_shard_optimizer``."""
