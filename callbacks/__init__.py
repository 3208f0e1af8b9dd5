"""Lightning callbacks that YAML can name."""
