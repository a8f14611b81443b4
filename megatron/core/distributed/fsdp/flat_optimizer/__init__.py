"""``FlatAdamW``: AdamW and gradient norms on flat shards, a whole parameter group at a time."""
