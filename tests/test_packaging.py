import ast
import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import agentrl

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_agentrl_loads_no_heavy_library():
    """F095: the core imports without what a GPU needs, and at once."""
    heavy = {"torch", "transformers", "accelerate", "datasets", "docker", "matplotlib", "sglang"}
    loaded = run_python("import sys, agentrl; print(*{name.split('.')[0] for name in sys.modules})")
    assert not heavy & set(loaded.split())


def test_every_public_name_can_be_imported():
    for name in agentrl.__all__:
        assert getattr(agentrl, name) is not None


def test_the_version_is_the_packages():
    assert agentrl.__version__ == PROJECT["version"]


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_the_tested_versions_meet_the_floors():
    tested = pins("constraints-cpu.txt")
    extras = PROJECT["optional-dependencies"]
    (sglang,) = map(Requirement, extras["sglang"])
    assert sglang.specifier.contains(pins("requirements-sglang-cpu.txt")["sglang"])
    required = [Requirement(text) for text in PROJECT["dependencies"] + extras["demo"]]
    for requirement in required:
        assert requirement.name in tested, f"constraints-cpu.txt does not pin {requirement.name}"
        assert requirement.specifier.contains(tested[requirement.name])


def test_every_third_party_import_is_a_declared_dependency():
    extras = PROJECT["optional-dependencies"].values()
    required = [*PROJECT["dependencies"], *(text for extra in extras for text in extra)]
    declared = {canonicalize_name(Requirement(text).name) for text in required}
    distributions = importlib.metadata.packages_distributions()
    ours = {"agentrl", "tools", "envs", "rollout", "train"}
    undeclared = {}
    for room in ours:
        for path in (ROOT / room).rglob("*.py"):
            for name in imported_names(path) - ours - set(sys.stdlib_module_names):
                owners = {canonicalize_name(owner) for owner in distributions.get(name, [name])}
                if not owners & declared:
                    undeclared.setdefault(name, str(path.relative_to(ROOT)))
    assert not undeclared


def imported_names(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("target", ["help", "demo", "test", "check", "bench", "sglang-cpu"])
def test_make_help_has_a_line_for_each_target(target):
    output = subprocess.run(
        ["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert any(line.split()[:2] == ["make", target] for line in output.splitlines())
