"""The ranks over which parameters are sharded, and those over which the model is split in addition."""
