"""What the vLLM adapter touches, looked up in the releases it supports, from their wheels' sources.

    python benchmarks/vllm/compat.py

Downloads each wheel in turn (some hundred MB, deleted again), parses the files that `requirements`
names without importing them, and writes a table: a release is compatible when every name, field and
signature is there, and each hook is called the way the adapter expects.
"""

from __future__ import annotations

import ast
import copy
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from record import RESULTS, arguments, save
from requirements import (
    ATTRIBUTES,
    CALLS,
    FIELDS,
    LAYERS,
    MANAGER,
    METHODS,
    NAMES,
    REGISTRY,
    RUNNER,
    SPECS,
    STATE,
    UTILS,
)

from hybrid_runtime.integrations.vllm import hooks, versions

RELEASES = [f"0.{minor}" for minor in ("25.1", "26.0", "27.1", *(f"{n}.0" for n in range(28, 34)))]
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (17, 28, 31, 34, 35)] + ["manylinux2014_x86_64"]


MAMBA = "model_executor/layers/mamba/abstract.py"


class Source:
    """Parsed files of one release."""

    def __init__(self, root: Path, release: str) -> None:
        self.root, self.release = root, versions.parsed(release)
        self._trees: dict[str, ast.Module] = {}

    def tree(self, path: str) -> ast.Module:
        if path not in self._trees:
            self._trees[path] = ast.parse((self.root / "vllm" / path).read_text(encoding="utf-8"))
        return self._trees[path]

    def find(self, path: str, owner: str | None, name: str | None = None) -> Any:
        """A class, or a function of it or of the module; None if there is none."""
        body: Any = self.tree(path).body
        for wanted in (owner, name):
            if wanted is not None:
                kinds = (ast.ClassDef, ast.FunctionDef)
                found = [n for n in body if isinstance(n, kinds) and n.name == wanted]
                if not found:
                    return None
                body = found[-1].body
        return found[-1]


def parameters(function: ast.FunctionDef) -> tuple[list[str], int]:
    """Names without `self`, and how many of them a caller must give."""
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    defaults = len(function.args.defaults) + sum(d is not None for d in function.args.kw_defaults)
    names = [a.arg for a in every if a.arg != "self"]
    return names, len(names) - defaults


def signature(function: ast.FunctionDef) -> str:
    """As `hooks.signature` of the imported method."""
    arguments = copy.deepcopy(function.args)
    del arguments.args[0]
    for argument in (*arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    return f"({ast.unparse(arguments)})"


def assigned(node: ast.AST) -> Iterator[str]:
    """Names that a class or module body binds."""
    for item in getattr(node, "body", []):
        if isinstance(item, ast.AnnAssign | ast.Assign):
            targets = [item.target] if isinstance(item, ast.AnnAssign) else item.targets
            yield from (t.id for t in targets if isinstance(t, ast.Name))
        elif isinstance(item, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in item.names)
        elif isinstance(item, ast.FunctionDef | ast.ClassDef):
            yield item.name
        elif isinstance(item, ast.If):
            yield from assigned(item)


def own_attributes(node: ast.AST) -> set[str]:
    """What methods of a class assign on `self`."""
    stored = (n for n in ast.walk(node) if isinstance(n, ast.Attribute))
    return {
        n.attr for n in stored if isinstance(n.ctx, ast.Store) and ast.unparse(n.value) == "self"
    }


def checks(source: Source) -> Iterator[tuple[str, bool]]:
    """Every requirement and whether the release meets it."""
    for (path, owner, name), expected in METHODS.items():
        function, wanted = source.find(path, owner, name), expected.split()
        names, required = parameters(function) if function else ([], 0)
        met = bool(function) and names[: len(wanted)] == wanted and required <= len(wanted)
        yield f"{path}: {owner + '.' if owner else ''}{name}({', '.join(wanted)})", met
    for name, known in hooks.SIGNATURES.items():
        function = source.find(STATE, "MambaHybridModelState", name)
        if function or name not in hooks.EITHER:
            met = bool(function) and signature(function) == known
            yield f"{STATE}: MambaHybridModelState.{name}{known}", met
    for path, layer in LAYERS.items():
        yield from _layer(source, path, layer)
    function = source.find(STATE, "MambaHybridModelState", "prepare_attn")
    met = bool(function) and parameters(function)[0][:6] == hooks.PREPARE.split()
    yield f"{STATE}: MambaHybridModelState.prepare_attn({hooks.PREPARE}, ...)", met
    for (path, owner), fields in FIELDS.items():
        node = source.find(path, owner)
        bound = set(assigned(node)) if node else set()
        yield from ((f"{path}: {owner}.{field}", field in bound) for field in fields.split())
    for (path, owner), attributes in ATTRIBUTES.items():
        node = source.find(path, owner)
        bound = own_attributes(node) if node else set()
        yield from ((f"{path}: {owner}().{name}", name in bound) for name in attributes.split())
    for path, names in NAMES.items():
        bound = set(assigned(source.tree(path)))
        yield from ((f"{path}: {name}", name in bound) for name in names.split())
    for what, (path, inside, called, given) in CALLS.items():
        yield what, _calls(source.tree(path), inside, called, given)
    yield from _differences(source)


def _layer(source: Source, path: str, known: hooks.LayerHooks) -> Iterator[tuple[str, bool]]:
    """As `hooks.unknown_layer` of the imported class."""
    for name, wanted in known.methods.items():
        came_with = dict(known.later).get(name, "__init__")
        function = source.find(path, known.name, name) or source.find(MAMBA, "MambaBase", name)
        if function or source.find(path, known.name, came_with):
            met = bool(function) and signature(function) == wanted
            yield f"{path}: {known.name}.{name}{wanted}", met
    start, paths = known.paths
    if start:
        found = {name for name in assigned(source.find(path, known.name)) if name.startswith(start)}
        yield f"{path}: {known.name} runs rows in no other method", found <= set(paths.split())


def _calls(tree: ast.Module, inside: str, called: str, arguments: list[str]) -> bool:
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == inside]
    calls = [
        [ast.unparse(a) for a in n.args]
        for function in functions
        for n in ast.walk(function)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == called
    ]
    return any(call[: len(arguments)] == arguments for call in calls)


def _differences(source: Source) -> Iterator[tuple[str, bool]]:
    """What `versions.py` takes one way or another, and the guard the adapter leans on."""

    def state(name: str) -> Any:
        return source.find(STATE, "MambaHybridModelState", name)

    contexts = sum(state(name) is not None for name in hooks.EITHER)
    yield "a copy context on first use, or with the cache and its slot tables", contexts == 1
    config = set(assigned(source.find(SPECS, "KVCacheConfig")))
    interval = "prefix_cache_retention_interval" in config
    interval |= "VLLM_PREFIX_CACHE_RETENTION_INTERVAL" in set(assigned(source.tree("envs.py")))
    yield "the retention interval in the cache's configuration or the environment", interval
    context = set(assigned(source.find(UTILS, "MambaSpecDecodeGPUContext")))
    sizes = "num_states" in context or {"num_layers", "num_state_types"} <= context
    yield "the copy context counts its states", sizes
    guards = [
        ast.unparse(n.test) for n in ast.walk(state("postprocess_state")) if isinstance(n, ast.If)
    ]
    guarded = any("num_computed_tokens is not None" in g and "_align_mode" in g for g in guards)
    yield "postprocess_state copies nothing when it is handed no counts", guarded
    plain = "num_draft_tokens_per_req > 0" in ast.unparse(state("prepare_attn"))
    known = plain == (source.release < versions.PLAIN_ROWS_DECODE)
    yield "rows without drafts decode Gated DeltaNet, or are flushed before", known
    frees = source.find(MANAGER, "MambaManager", "remove_skipped_blocks")
    optimistic = "self.num_speculative_blocks" in ast.unparse(frees)
    known = not optimistic or parameters(frees)[0][:2] == ["request_id", "num_computed_tokens"]
    yield "blocks are freed by what is certain, or by a count that our manager can lower", known
    chooser = ast.unparse(source.tree("v1/worker/gpu/model_states/__init__.py"))
    yield "a model may name its model state", "model.get_model_state_cls()" in chooser
    group = ast.unparse(source.tree("plugins/__init__.py"))
    yield "plug-ins load from vllm.general_plugins", "'vllm.general_plugins'" in group


def architectures(source: Source) -> list[str]:
    """Of the architectures that the plug-in takes over, those that the release knows."""
    keys = {
        n.value
        for n in ast.walk(source.tree(REGISTRY))
        if isinstance(n, ast.Constant) and isinstance(n.value, str)
    }
    return [name for name in versions.ARCHITECTURES if name in keys]


def unpack(release: str, folder: Path) -> None:
    """Download a wheel and keep the Python files of `vllm` that are looked at."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp", "-d", str(folder)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, f"vllm=={release}"], check=True)
    (wheel,) = folder.glob("vllm-*.whl")
    wanted = {path for path, *_ in METHODS} | {path for path, _ in (*FIELDS, *ATTRIBUTES)}
    wanted |= {RUNNER, MAMBA, *LAYERS, MANAGER, *NAMES, "v1/worker/gpu/model_states/__init__.py"}
    with zipfile.ZipFile(wheel) as archive:
        for path in sorted(wanted):
            archive.extract(f"vllm/{path}", folder)
    wheel.unlink()


def main() -> None:
    parser = arguments(__doc__, "default: benchmarks/results/cpu/vllm_compat.json")
    parser.add_argument("--unpacked", type=Path, help="folder with one unpacked wheel per release")
    args = parser.parse_args()
    releases: dict[str, Any] = {}
    for release in RELEASES:
        with tempfile.TemporaryDirectory() as scratch:
            root = args.unpacked / release if args.unpacked else Path(scratch)
            if not args.unpacked:
                unpack(release, root)
            source = Source(root, release)
            met = dict(checks(source))
            known = architectures(source)
        missing = [what for what, there in met.items() if not there]
        releases[release] = {
            "supported": versions.supported(release),
            "checked": len(met),
            "missing": missing,
            "architectures": known,
        }
        print(f"{release}: {len(met) - len(missing)} of {len(met)} there, {len(known)} models")
        print("".join(f"  missing: {what}\n" for what in missing), end="")
    out = args.out or RESULTS / "cpu" / "vllm_compat.json"
    save("vllm_compat", {"releases": releases, "requirements": list(met)}, out)
    if any(found["missing"] for found in releases.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
