"""AdamW and gradient norms over whole shards."""
