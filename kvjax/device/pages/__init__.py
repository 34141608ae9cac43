"""Page arrays: made, written, copied, zeroed, and moved between devices and host."""
