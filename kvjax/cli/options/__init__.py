"""Arguments that commands share, and what values they make of them."""
