"""The `kvjax` command: `generate`, `replay`, `bench` and `plan`, each imported only when it is named."""

__all__ = ["main"]
