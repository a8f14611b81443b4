"""Training from the command line: flags, loop, checkpoints, logs."""
