"""How a deployment keeps recurrent states: how often, in how many bits, with rings."""
