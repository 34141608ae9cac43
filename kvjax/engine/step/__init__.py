"""One step of the engine: its host loop on each data rank, its model on the device, and its recovery."""
