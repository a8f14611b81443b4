"""The training loop: steps, evaluation, agreement of ranks, and the counters of a run."""
