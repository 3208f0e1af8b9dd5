"""Matrix products, casts on use and local shards."""
