"""Parts of scripts/make_goldens.py: the tiny models, their weights, and what transformers computes with them."""
