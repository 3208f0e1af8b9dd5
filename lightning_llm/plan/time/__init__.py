"""Seconds of an optimizer step on a cluster, by a roofline model. No parameter is fitted to measurements."""
