"""Matrix products, linear layers that cast their weight on use, ranks' parts of tensors, dtypes by name."""
