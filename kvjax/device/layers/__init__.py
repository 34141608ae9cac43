"""What a layer of a model asks of the cache in a step: attention of each kind, states, and the tokens that count."""
