"""KV beyond a replica's pools: in tiers, or with the replica that computed it."""
