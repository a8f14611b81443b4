"""DTensor placements for unevenly split rows, and the boxes of a whole tensor that a rank holds."""
