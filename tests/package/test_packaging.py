"""The wheel holds every package and data file under the installed names, and works beside the
package called `kernels` on PyPI."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "hybrid_runtime": "hybrid_runtime",
    "kernels": "hybrid_runtime/kernels",
    "specdecode": "hybrid_runtime/specdecode",
}
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")

# Prints, as JSON, the file each imported module came from and the command's entry point.
IMPORT_ALL = """
import importlib, importlib.metadata, json, pkgutil
import hybrid_runtime, kernels
names = ["hybrid_runtime", "kernels"] + [
    module.name
    for module in pkgutil.walk_packages(hybrid_runtime.__path__, "hybrid_runtime.")
    # The spec is a class of vLLM's, so it exists only beside vLLM.
    if not module.name.endswith((".__main__", ".vllm.spec"))
]
files = {name: importlib.import_module(name).__file__ for name in names}
entries = importlib.metadata.distribution("hybrid-runtime").entry_points
(script,) = entries.select(group="console_scripts")
print(json.dumps({
    "files": files,
    "kernels": importlib.metadata.version("kernels"),
    "script": [script.name, callable(script.load())],
}))
"""


def run(*command: str | Path) -> str:
    """Run a command and return what it printed; on failure, fail the test with all of it."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"{command}\n{done.stdout}\n{done.stderr}", pytrace=False)
    return done.stdout


def source_files() -> dict[str, Path]:
    """Files of the checkout that belong in the wheel, by their path in it."""
    found = {}
    for folder, installed in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            inside = path.relative_to(ROOT / folder)
            shipped = path.suffix == ".py" or path.name == "py.typed" or "checkpoints" in path.parts
            if path.is_file() and shipped and "__pycache__" not in path.parts:
                found[f"{installed}/{inside.as_posix()}"] = path
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Built from a copy: setuptools leaves build/ behind, and its old files get into later wheels.
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in FOLDERS:
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / folder, source / folder, ignore=ignore)
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source)
    (built,) = out.glob("*.whl")
    return built


@pytest.mark.slow
def test_wheel_holds_exactly_the_source_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {
            name: archive.getinfo(name).file_size
            for name in archive.namelist()
            if ".dist-info/" not in name
        }
        metadata = {name.partition(".dist-info/")[2] for name in archive.namelist()}
    expected = {name: path.stat().st_size for name, path in source_files().items()}
    hint = "a new folder with an __init__.py belongs in tool.setuptools.packages of pyproject.toml"
    assert held == expected, hint
    assert "licenses/LICENSE" in metadata


@pytest.mark.slow
@pytest.mark.network
def test_wheel_imports_beside_the_kernels_package_of_pypi(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment)
    python = environment / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    run(*PIP, "--python", python, "install", "--no-deps", "-c", constraints, wheel, "kernels")

    # The running environment's torch and the rest, without this project's own editable install:
    # its import hook is started by a .pth file, and those are not read in folders added this way.
    site = Path(
        run(python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    borrowed = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    (site / "borrowed.pth").write_text("\n".join(borrowed), encoding="utf-8")

    report = json.loads(run(python, "-I", "-c", IMPORT_ALL))
    modules = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in source_files()
        if name.endswith(".py") and not name.endswith(("/__main__.py", "/vllm/spec.py"))
    }
    assert set(report["files"]) == modules | {"kernels"}
    outside = {
        name: file
        for name, file in report["files"].items()
        if not file.startswith(f"{site}{os.sep}")
    }
    assert not outside
    assert f"kernels=={report['kernels']}" in constraints.read_text(encoding="utf-8").splitlines()
    assert report["script"] == ["hybrid-runtime", True]
