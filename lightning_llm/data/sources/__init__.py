"""Sources of documents: loaders, each with its config class and its reader, and what all of them share."""
