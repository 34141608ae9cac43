"""Records what a stack's classes and functions look like where kvjax's adapters touch them.

    python scripts/record_signatures.py tpu_inference 0.32.0 --from PATH     an unpacked wheel, or a checkout's sources
    python scripts/record_signatures.py tpu_inference 0.32.0                 the installed package

Flow:    sources of a stack -> [record_signatures] -> kvjax/adapters/recorded/<stack>/<version>.json

Sources are parsed, never imported, so nothing that the stack needs has to be installed.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvjax.adapters.signatures import RECORDED

# Stack -> package to install, object or its method -> (module, what of it is recorded).
OBJECTS: dict[str, tuple[str, dict[str, tuple[str, str]]]] = {
    "tpu_inference": (
        "tpu_inference",
        {
            "AttentionMetadata": ("tpu_inference.layers.common.attention_metadata", "fields"),
            "GroupedAttentionMetadata": ("tpu_inference.layers.common.attention_metadata", "methods"),
            "sharded_ragged_paged_attention": ("tpu_inference.layers.common.attention_interface", "parameters"),
        },
    ),
    "sglang_jax": (
        "sglang-jax",
        {
            "BasePrefixCache": ("sgl_jax.srt.mem_cache.base_prefix_cache", "methods"),
            "MatchPrefixParams": ("sgl_jax.srt.mem_cache.base_prefix_cache", "fields"),
            "MatchResult": ("sgl_jax.srt.mem_cache.base_prefix_cache", "fields"),
            "EvictParams": ("sgl_jax.srt.mem_cache.base_prefix_cache", "fields"),
            "EvictResult": ("sgl_jax.srt.mem_cache.base_prefix_cache", "fields"),
            "IncLockRefResult": ("sgl_jax.srt.mem_cache.base_prefix_cache", "fields"),
            "DecLockRefParams": ("sgl_jax.srt.mem_cache.base_prefix_cache", "fields"),
            "RadixKey": ("sgl_jax.srt.mem_cache.radix_cache", "methods"),
            "SWARadixCache": ("sgl_jax.srt.mem_cache.swa_radix_cache", "methods"),
            "BaseTokenToKVPoolAllocator": ("sgl_jax.srt.mem_cache.allocator", "methods"),
            "TokenToKVPoolAllocator": ("sgl_jax.srt.mem_cache.allocator", "methods"),
            "PagedTokenToKVPoolAllocator": ("sgl_jax.srt.mem_cache.allocator", "methods"),
            "SWATokenToKVPoolAllocator": ("sgl_jax.srt.mem_cache.allocator", "methods"),
            "TreeCacheBuildContext": ("sgl_jax.srt.mem_cache.registry", "fields"),
            "default_radix_cache_factory": ("sgl_jax.srt.mem_cache.registry", "parameters"),
            "CacheInitParams": ("sgl_jax.srt.mem_cache.cache_init_params", "fields"),
            "FlashAttentionMetadata": ("sgl_jax.srt.layers.attention.flashattention_backend", "fields"),
        },
    ),
    "easydel": (
        "easydel",
        {
            "RaggedPagesMetadata": ("easydel.caching.ragged_page.cache", "fields"),
            "CacheManager": ("easydel.inference.esurge.core.manager", "methods"),
            "CachePages": ("easydel.inference.esurge.core.manager", "methods"),
        },
    ),
}


def describe(node: ast.AST, kind: str) -> Any:
    """A class's annotated names or its methods' parameters, or a function's parameters, in order."""
    if kind == "parameters":
        assert isinstance(node, ast.FunctionDef)
        return _parameters(node.args)
    assert isinstance(node, ast.ClassDef)
    if kind == "fields":
        return [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    decorated = {"property", "classmethod", "staticmethod"}
    return {
        n.name: _parameters(n.args)
        for n in node.body
        if isinstance(n, ast.FunctionDef)
        and (n.name == "__init__" or not n.name.startswith("_"))
        and not decorated & {d.id for d in n.decorator_list if isinstance(d, ast.Name)}
    }


def _parameters(args: ast.arguments) -> list[str]:
    names = [a.arg for a in args.posonlyargs + args.args]
    names += [f"*{args.vararg.arg}"] if args.vararg else []
    names += [a.arg for a in args.kwonlyargs]
    names += [f"**{args.kwarg.arg}"] if args.kwarg else []
    return [name for name in names if name != "self"]


def source_of(module: str, root: Path | None) -> str:
    """The module's text: below `root`, or of the installed package."""
    if root is not None:
        return (root / Path(*module.split("."))).with_suffix(".py").read_text()
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{top} is not installed: give --from the path of its sources")
    return Path(spec.submodule_search_locations[0], *rest).with_suffix(".py").read_text()


def record(stack: str, version: str, root: Path | None) -> dict[str, Any]:
    """What `recorded/<stack>/<version>.json` has."""
    package, objects = OBJECTS[stack]
    found: dict[str, Any] = {}
    for name, (module, kind) in objects.items():
        tree = ast.parse(source_of(module, root))
        node: Any = tree
        for part in name.split("."):
            nodes = [n for n in node.body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == part]
            if not nodes:
                raise SystemExit(f"{module} has no {name}")
            node = nodes[0]
        found[name] = {"module": module, kind: describe(node, kind)}
    return {"package": package, "version": version, "objects": found}


def main(arguments: list[str] | None = None) -> None:
    """Writes the file and tells its path."""
    parser = argparse.ArgumentParser(description="Record a stack's signatures.")
    parser.add_argument("stack", choices=sorted(OBJECTS))
    parser.add_argument("version")
    parser.add_argument("--from", dest="root", type=Path, default=None, help="folder that holds the stack's package")
    options = parser.parse_args(arguments)
    path = RECORDED / options.stack / f"{options.version}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record(options.stack, options.version, options.root), indent=1) + "\n")
    print(path.relative_to(RECORDED.parents[2]))


if __name__ == "__main__":
    main()
