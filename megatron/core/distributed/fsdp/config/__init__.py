"""Choices: what is sharded, in which dtypes, and what differs between versions of torch."""
