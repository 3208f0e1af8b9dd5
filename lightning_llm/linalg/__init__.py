"""Matrix products, casts on use, local shards."""
