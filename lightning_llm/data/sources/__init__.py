"""Sources of documents: a file per loader, with its config class and its reader."""
