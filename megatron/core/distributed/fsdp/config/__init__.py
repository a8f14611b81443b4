"""What users choose for a unit (placements, dtypes), and what differs between versions of torch."""
