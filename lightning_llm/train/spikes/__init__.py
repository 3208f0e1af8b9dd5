"""Anomalous steps: detection of non-finite values and spikes, search for their origin, and actions on them."""
