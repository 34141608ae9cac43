"""What a request is: prompt, sampling parameters and inputs, its output and its text, and what it cost."""
