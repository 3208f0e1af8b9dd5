"""Sources of documents: loaders, each with its config class and its reader, and code that all of them share."""
