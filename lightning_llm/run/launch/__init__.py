"""Processes of a run: started, watched and joined."""
