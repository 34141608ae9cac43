"""Parts of scripts/mutate_core.py: which changes there are, which tests run a line, and one run of tests per change."""
