"""Pages of results, bars to clear and checks that losses agree."""
