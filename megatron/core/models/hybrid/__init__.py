"""Megatron-Core's import paths of hybrid models, which are ``GPTModel`` here."""
