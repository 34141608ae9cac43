"""Which requests take part in a step, with how many tokens and drafts, and what its tokens change."""
