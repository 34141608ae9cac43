"""The `kvjax` command: `generate`, `replay` and `plan`. Each subcommand's module is imported only when it is named."""
