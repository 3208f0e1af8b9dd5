"""Mixtures: the source of each training sample, and its window there, as pure functions of the sample's number."""
