"""Log lines, metrics, clocks, writers, and signs of life between ranks."""
