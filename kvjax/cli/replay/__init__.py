"""The forms of `kvjax replay` beside a single run, and its picture."""
