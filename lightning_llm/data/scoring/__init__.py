"""Scorers of documents, and the table of their scores."""
