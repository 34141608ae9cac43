"""Publishers and subscribers over ZeroMQ."""
