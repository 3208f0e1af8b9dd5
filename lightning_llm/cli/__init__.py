"""The verbs of the command line that have no package of their own, one file each."""
