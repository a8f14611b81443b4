"""What shows how a run goes while it runs: the time that is left, a status page, metrics for Prometheus."""
