"""Seconds of an optimizer step on a cluster, by a roofline. Nothing here was fitted to any measurement."""
