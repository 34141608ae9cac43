"""What callers hold: the engine, its form for asyncio, and its life between runs."""
