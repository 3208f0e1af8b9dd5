"""Everything known about a run before it starts, without torch: degrees, memory, traffic, time, legality, search."""
