"""The commands, a module each with `add_arguments` and `run`."""
