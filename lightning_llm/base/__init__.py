"""What every other package stands on: errors, files, processes, the terminal. Imports nothing of ours."""
