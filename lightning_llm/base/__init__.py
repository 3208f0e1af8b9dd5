"""Foundation of all other packages: errors, files, processes, the terminal. Imports none of our packages."""
