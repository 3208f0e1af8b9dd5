"""Everything that a run writes, and its readers: run folder, heartbeats, provenance, MLflow and other loggers."""
