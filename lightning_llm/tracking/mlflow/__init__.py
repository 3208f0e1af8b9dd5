"""MLflow: the store, the process that writes to it, logging of runs and sweeps, later syncing, links to its pages."""
