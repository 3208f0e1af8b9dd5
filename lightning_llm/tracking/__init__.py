"""Everything a run leaves: its files and their readers, signs of life, provenance, MLflow and other loggers."""
