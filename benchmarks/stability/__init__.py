"""The stability benchmark: how an RL loss holds when the sampler is stale or coarse."""
