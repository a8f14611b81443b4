"""Tokenizer, datasets and batches of a run."""
