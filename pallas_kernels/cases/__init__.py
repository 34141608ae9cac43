"""What `cases.py` and `oracle.py` of every op are made of. Scripts and tests find the ops by them."""
