"""Run a plan's real model, layout, schedule and step on fake ranks and fake tensors, and count bytes and operations."""
