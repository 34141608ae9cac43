"""What a manager may decide one way or another, and what releases of vLLM decide."""
