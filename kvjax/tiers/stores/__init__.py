"""Where units lie beyond the pools: host memory and files, and which of them go next."""
