"""The parts that decoders share, one idea a file."""
