"""The real model, layout, schedule and step of a plan, on fake ranks and fake tensors: counted, not estimated."""
