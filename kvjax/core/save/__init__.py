"""The whole state of a manager as bytes, and back."""
