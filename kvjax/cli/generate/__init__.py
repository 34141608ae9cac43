"""What `kvjax generate` reads and shows: prompts, the text as it comes, the report and its picture."""
