"""Steps out of the ordinary: non-finite values and where they began, spikes, and what is done about them."""
