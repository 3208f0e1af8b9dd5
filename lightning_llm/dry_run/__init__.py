"""One step of a plan's real model and layout on fake ranks and fake tensors; counts bytes and operations."""
