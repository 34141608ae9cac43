"""What the demo model was made from."""
