"""Programs of the rows. Each prints one JSON object as its last line; its exit status is 1 where something is wrong."""
