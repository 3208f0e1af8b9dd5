"""MLflow: the store, the process that writes to it, what runs and sweeps log, late syncing, its pages."""
