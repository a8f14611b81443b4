"""DTensor placements for unevenly split rows, and which boxes of a whole tensor a rank holds."""
