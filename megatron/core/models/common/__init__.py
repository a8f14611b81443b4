"""Parts that models share."""
