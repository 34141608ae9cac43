"""One call of the model over the pages: its compiled programs, its outputs, and drafts that it accepts."""
