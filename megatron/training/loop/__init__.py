"""Training steps and what runs between them."""
