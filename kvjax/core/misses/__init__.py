"""Why a lookup found no more of a prompt than it did."""
