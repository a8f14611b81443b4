"""Log lines, metrics, clocks, writers, and signs of life of ranks."""
