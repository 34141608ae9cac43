"""Laws of the tree: imports point one way, the core is free of jax, every module says what it is."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted(p for package in ("kvjax", "pallas_kernels") for p in (ROOT / package).rglob("*.py"))
STANDARD_LIBRARY = frozenset(sys.stdlib_module_names)

# Package prefix -> what its modules may import beside the standard library. The longest matching prefix decides.
HOST = ("numpy", "kvjax.core", "kvjax.errors", "pallas_kernels.layouts")
CONFIGS = tuple(f"kvjax.models.{name}" for name in ("config", "configs", "registry"))
ALLOWED = {
    "pallas_kernels.layouts": (),
    "pallas_kernels": ("jax", "jaxlib", "numpy", "pallas_kernels"),
    "kvjax": (),
    "kvjax.errors": (),
    "kvjax.extras": ("kvjax.errors",),
    "kvjax.text": (),
    "kvjax.core": (*HOST, "cbor2", "xxhash"),
    "kvjax.device": (*HOST, "jax", "flax", "kvjax.device", "pallas_kernels"),
    "kvjax.events": ("kvjax.core", "kvjax.errors", "kvjax.events", "kvjax.extras", "msgspec", "zmq"),
    "kvjax.metrics": ("kvjax.core", "kvjax.errors", "kvjax.extras", "kvjax.metrics", "numpy", "prometheus_client"),
    "kvjax.nnx": ("flax", "kvjax.core", "kvjax.device"),
    "kvjax.planning": (*HOST, "kvjax.planning", "kvjax.text"),
    "kvjax.configs": (*HOST, *CONFIGS, "kvjax.planning", "kvjax.text"),
    "kvjax.models": (
        *HOST,
        "jax",
        "flax",
        "jinja2",
        "safetensors",
        "tokenizers",
        "kvjax.device",
        "kvjax.extras",
        "kvjax.models",
    ),
    "kvjax.models.config": (*HOST, *CONFIGS),
    "kvjax.models.configs": (*HOST, *CONFIGS),
    "kvjax.models.registry": (*HOST, *CONFIGS, "flax", "kvjax.models.layers.language_model"),
    "kvjax.adapters": (*HOST, "kvjax.adapters"),  # stacks are imported by name, on use
    "kvjax.adapters.tpu_inference": (*HOST, "jax", "kvjax.adapters"),
    "kvjax.demo": ("kvjax.demo",),
    "kvjax.tiers": (*HOST, "xxhash", "kvjax.extras", "kvjax.tiers"),
    "kvjax.tiers.tiers": (*HOST, "kvjax.device", "kvjax.tiers"),
    "kvjax.tiers.worker.tier_worker": (*HOST, "jax", "kvjax.device", "kvjax.tiers"),
    "kvjax.tiers.processes.homes": (*HOST, "jax", "kvjax.device", "kvjax.tiers"),
    "kvjax.tiers.processes.process_tiers": (*HOST, "kvjax.device", "kvjax.tiers"),
    "kvjax.transfer": (
        *HOST,
        "jax",
        "cbor2",
        "cryptography",
        "kvjax.device",
        "kvjax.extras",
        "kvjax.tiers.connector",
        "kvjax.tiers.processes.reports",
        "kvjax.tiers.worker.pace",
        "kvjax.transfer",
        "pallas_kernels",
    ),
    "kvjax.engine": (
        *HOST,
        "jax",
        "flax",
        "kvjax.device",
        "kvjax.engine",
        "kvjax.models",
        "kvjax.planning",
        "kvjax.tiers",
    ),
    "kvjax.routing": ("kvjax.core", "kvjax.errors", "kvjax.routing"),
    "kvjax.replay": (
        *HOST,
        "kvjax.replay",
        "kvjax.engine.requests",
        "kvjax.engine.scheduling",
        "kvjax.routing",
        "kvjax.planning",
        "kvjax.models.config",
        "kvjax.configs",
        "kvjax.text",
        "kvjax.tiers",
    ),
    "kvjax.bench": ("numpy", "kvjax.bench", "kvjax.engine", "kvjax.text"),
    "kvjax.bench.floor": ("jax", "flax", "kvjax.bench", "kvjax.core"),
    "kvjax.bench.hugging_face": ("kvjax.errors", "kvjax.extras"),
    "kvjax.cli": ("numpy", "tqdm", "matplotlib", "kvjax"),
    "kvjax.cli.commands.check": ("jax", "kvjax.cli", "pallas_kernels"),
    "kvjax.cli.commands.generate": ("numpy", "jax", "kvjax"),
    "kvjax.cli.pictures.figures": ("matplotlib", "PIL", "kvjax.cli"),  # PIL is what matplotlib writes PNGs with
    "kvjax.cli.running.start_up": ("jax", "kvjax"),
    "kvjax.__main__": ("kvjax.cli",),
}


ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
CORE_README = (ROOT / "kvjax" / "core" / "README.md").read_text()
HEADINGS = frozenset(re.findall(r"^#+ (.+)$", ARCHITECTURE, re.MULTILINE))
TEXTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "kvjax/**/*.py", "pallas_kernels/**/*.py", "scripts/**/*.py", "tests/**/*.py")
    for path in ROOT.glob(pattern)
    if path != Path(__file__)
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """Absolute names of everything the module imports, at its top or inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: expected absolute imports, got a relative one on line {node.lineno}"
            assert node.module is not None
            names.add(node.module)
    return names


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_one_way(path: Path) -> None:
    name = module_name(path)
    rule = max((prefix for prefix in ALLOWED if within(name, (prefix,))), key=len)
    for imported in imports_of(path):
        if imported.split(".")[0] in STANDARD_LIBRARY or imported == "kvjax":  # the latter has the version alone
            continue
        assert within(imported, ALLOWED[rule]), f"{name} imports {imported}; {rule} may import {ALLOWED[rule]}"


# Package -> its rooms, low to high: a module imports its own room and lower ones, for types too.
ROOMS = {
    "kvjax.core": (
        "tables",
        "spec",
        "hashing",
        "requests",
        "watch",
        "eviction",
        "options",
        "pool",
        "slabs",
        "kinds",
        "step",
        "misses",
        "save",
        "manager",
        "record",
        "serving",
        "extending",
    ),
    "kvjax.device": ("mesh", "programs", "pages", "inputs", "layers", "model", "encoder", "steps"),
    "kvjax.engine": ("requests", "sampling", "scheduling", "step", "drafts", "front"),
}
IN_ROOMS = [path for path in MODULES if within(module_name(path), tuple(ROOMS)) and module_name(path) not in ROOMS]


def package_and_room(name: str) -> tuple[str, str | None]:
    """Of a module in a package of rooms; no room: the package itself, which exports from every room."""
    parts = name.split(".")
    return ".".join(parts[:2]), parts[2] if len(parts) > 2 else None


@pytest.mark.parametrize("path", IN_ROOMS, ids=module_name)
def test_rooms_import_lower_rooms_only(path: Path) -> None:
    name = module_name(path)
    package, room = package_and_room(name)
    assert room in ROOMS[package]
    lower = ROOMS[package][: ROOMS[package].index(room) + 1]
    for imported in imports_of(path):
        if within(imported, (package,)):
            assert package_and_room(imported)[1] in lower, f"{name} imports {imported}; {room} may import {lower}"


def test_modules_in_rooms_import_each_other_in_no_circle() -> None:
    """But Request and RequestTable, of which each holds the other."""
    imports = {module_name(path): imports_of(path) for path in IN_ROOMS}
    imports["kvjax.core.requests.request"].discard("kvjax.core.requests.request_table")
    order = TopologicalSorter({name: imported & imports.keys() for name, imported in imports.items()})
    order.prepare()  # raises CycleError


# Folders of more files than a reader takes in at a glance; a list of families of models is one.
LARGE_FOLDERS = {
    *(f"kvjax/{name}" for name in ("core/eviction", "core/kinds", "core/manager", "models/configs", "models/decoders")),
    *(f"tests/{name}" for name in ("core/manager", "pallas_kernels")),
}


@pytest.mark.parametrize("tree", ["kvjax", "tests"])
def test_folders_stay_small(tree: str) -> None:
    folders = Counter(str(path.parent.relative_to(ROOT)) for path in (ROOT / tree).rglob("*.py"))
    large = {folder for folder, num_files in folders.items() if num_files > 14}
    assert {folder for folder in large - LARGE_FOLDERS if not folder.startswith("tests/pallas_kernels/")} == set()


# What an op of pallas_kernels imports of other ops. All else that several ops share stands beside them.
OPS_BELOW = {
    "compressor_update": ("kv_write",),
    "gated_delta_rule": ("page_ops.tpu_states",),
    "mla_paged_attention": (
        "latent_write",
        "ragged_paged_attention.oracle",
        "ragged_paged_attention.reference",
    ),
    "ragged_paged_attention": ("kv_write",),
    "ring_delta_rule": tuple(f"gated_delta_rule.{name}" for name in ("arguments", "reference", "validate")),
    "ring_scan": tuple(
        f"ssm_update.{name}" for name in ("arguments", "reference", "running_sums", "shapes", "tpu_decode", "validate")
    ),
    "sparse_mla_attention": ("latent_write",),
    "ssm_update": ("page_ops.tpu_states",),
}
OPS = {path.parent.name for path in (ROOT / "pallas_kernels").glob("*/api.py")}
KERNEL_MODULES = [path for path in MODULES if path.is_relative_to(ROOT / "pallas_kernels")]


@pytest.mark.parametrize("path", KERNEL_MODULES, ids=module_name)
def test_what_ops_share_knows_no_op_and_an_op_few_others(path: Path) -> None:
    own = path.relative_to(ROOT / "pallas_kernels").parts[0]
    models = [f"{op}.shapes" for op in OPS] if path.name == "cases.py" else []  # which ops share
    allowed = tuple(f"pallas_kernels.{name}" for name in (own, *OPS_BELOW.get(own, ()), *models))
    for imported in imports_of(path):
        if within(imported, tuple(f"pallas_kernels.{op}" for op in OPS)):
            assert within(imported, allowed), f"{module_name(path)} imports {imported}, expected one of {allowed}"


def test_scripts_and_tests_of_kernels_stand_apart() -> None:
    """What both need is in the packages."""
    scripts, tests = (ROOT / "scripts").rglob("*.py"), (ROOT / "tests" / "pallas_kernels").rglob("*.py")
    pairs = [(path, "tests") for path in scripts] + [(path, "scripts") for path in tests]
    assert [
        module_name(path) for path, other in pairs if any(within(name, (other,)) for name in imports_of(path))
    ] == []


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_every_module_says_what_it_is(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, f"{path} has no docstring"


@pytest.mark.parametrize(
    "module",
    [
        "kvjax",
        "kvjax.core",
        "kvjax.events",
        "kvjax.metrics",
        "kvjax.planning",
        "kvjax.models.config",
        "kvjax.replay",
        "kvjax.cli.main",
    ],
)
def test_host_side_loads_no_jax(module: str) -> None:
    code = f"import {module}, sys; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_device_layer_loads_no_manager() -> None:
    code = "import kvjax.device, sys; sys.exit('kvjax.core.manager.kv_cache_manager' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_names_of_the_core_are_those_of_its_two_tiers() -> None:
    import kvjax.core
    from kvjax.core import extending, serving

    assert sorted(kvjax.core.__all__) == sorted([*serving.__all__, *extending.__all__])
    assert not set(serving.__all__) & set(extending.__all__)
    with pytest.raises(AttributeError, match=r"module 'kvjax\.core' has no attribute 'nothing'"):
        kvjax.core.nothing  # noqa: B018


def test_layouts_load_nothing() -> None:
    code = "import pallas_kernels.layouts, sys; sys.exit(bool({'jax', 'numpy'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def citations_of(text: str) -> list[str]:
    """The headings that `text` cites: ARCHITECTURE.md, "One" and "Another", over line ends too."""
    lists = re.findall(r'ARCHITECTURE\.md,((?:(?:\s+and)?[\s#]*"[^"]+",?)+)', text)
    return [" ".join(title.split()) for titles in lists for title in re.findall(r'"([^"]+)"', titles)]


def test_citations_are_found_over_line_ends_and_in_lists() -> None:
    text = 'ARCHITECTURE.md, "One\n  heading" and "Two"; ARCHITECTURE.md,\n    "Three": "none"'
    assert citations_of(text) == ["One heading", "Two", "Three"]


def test_citations_of_the_architecture_name_its_headings() -> None:
    """A reader who follows `ARCHITECTURE.md, "Title"` finds that heading."""
    lost = [
        f"{path.relative_to(ROOT)}: {title}"
        for path in TEXTS
        for title in citations_of(path.read_text())
        if title not in HEADINGS
    ]
    assert lost == []


def test_sources_are_in_the_repository() -> None:
    """Nobody can follow a citation of a design document that only its authors have."""
    assert [str(path.relative_to(ROOT)) for path in TEXTS if re.search(r"\bDESIGN\b", path.read_text())] == []


def table_of(title: str, text: str) -> list[list[str]]:
    """The cells of the table under the heading `title`, without its head, as plain text."""
    section = re.split(rf"^#+ {re.escape(title)}$", text, flags=re.MULTILINE)[1]
    section = re.split(r"^#", section, flags=re.MULTILINE)[0]
    rows = [line.strip().strip("|").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in row] for row in rows[2:]]


def definitions_of(path: Path) -> set[str]:
    """Names of the functions, classes and methods (`Class.method`) that a module defines."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    top = [node for node in ast.parse(path.read_text()).body if isinstance(node, kinds)]
    methods = {f"{node.name}.{part.name}" for node in top for part in node.body if isinstance(part, kinds)}
    return methods | {node.name for node in top}


def test_the_glossary_defines_each_word_once() -> None:
    words = [row[0] for row in table_of("Words", ARCHITECTURE) + table_of("Words of the host side", CORE_README)]
    assert len(words) > 20
    assert sorted(words) == sorted(set(words))


@pytest.mark.parametrize("row", table_of("Where is ...?", CORE_README), ids=lambda row: row[0])
def test_the_map_leads_to_a_function_in_three_steps(row: list[str]) -> None:
    """From a question to a folder of the core, a file in it, and a function, method or class in that."""
    _, folder, file, function = row
    assert function in definitions_of(ROOT / "kvjax" / "core" / folder / file)


def test_the_readme_of_the_core_lists_its_rooms_in_their_order() -> None:
    assert tuple(Path(row[0]).stem for row in table_of("kvjax.core", CORE_README)) == ROOMS["kvjax.core"]


def test_modules_and_paths_that_the_architecture_names_exist() -> None:
    """`kvjax.core.pool` and `kvjax.core.pool.block_pool` are a folder and a module, `tests/x.py` is a file."""
    modules = re.findall(r"\b(?:kvjax|pallas_kernels)(?:\.[a-z]\w*)+", ARCHITECTURE)
    paths = re.findall(r"\b(?:kvjax|pallas_kernels|scripts|tests|docs)/[\w/.-]*\w", ARCHITECTURE)
    places = [ROOT / name.replace(".", "/") for name in modules] + [ROOT / path for path in paths]
    lost = {place for place in places if not (place.exists() or place.with_suffix(".py").exists())}
    assert lost == set()
