"""What the cache tells others of itself: events for routers, samples of residency, counts of hits, evicted blocks."""
