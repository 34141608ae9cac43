"""The `kvjax` command: `generate`, `replay`, `bench`, `check` and `plan`, each imported only when it is named."""

__all__ = ["main"]
