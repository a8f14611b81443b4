"""Start of the ranks, construction of the model, and ``pretrain``."""
