"""Mixtures of experts: feed-forward networks of which each token passes a few."""
