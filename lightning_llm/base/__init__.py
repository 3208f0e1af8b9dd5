"""Foundation of all other packages: errors, registry, hashing, hardware, files, terminal, signals."""
