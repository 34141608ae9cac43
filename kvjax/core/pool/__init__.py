"""One space of block ids: references, the prefix index, pages to copy and zero, views for people."""
