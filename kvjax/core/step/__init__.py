"""One step of the model as values: what the planner changed, and the arrays that the device needs."""
