"""A manager's calls written down with their answers, and made again."""
