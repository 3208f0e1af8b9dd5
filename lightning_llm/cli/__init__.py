"""The command line: one file per verb, and the table of their names, helps and options."""
