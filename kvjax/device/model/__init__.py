"""The model that a step runs: two functions or a module, its weights as a call takes them, and their digest."""
