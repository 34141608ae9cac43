"""One memory for pools of unlike pages: slabs that change hands."""
