"""Virtual time: who has it, what happens in its order, and how long a step takes."""
