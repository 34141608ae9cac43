"""Requests sent from one process to another: signed tickets, and entries over mutually authenticated TLS."""
