"""What users of any module call: ``fully_shard``, ``microbatch`` and ``fully_shard_optimizer``."""
