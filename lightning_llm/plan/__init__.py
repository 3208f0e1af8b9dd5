"""All that is known of a run before it starts, without torch: layout, memory, traffic, legality, report."""
