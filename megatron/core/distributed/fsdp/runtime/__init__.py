"""A training step: unsharding, resharding, prefetching and reducing, unit by unit."""
