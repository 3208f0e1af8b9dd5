"""Layouts as functions on an `nn.Module`: mesh, tensor, pipeline and context parallelism, FSDP2, reductions."""
