import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "agentrl": set(),
    "tools": {"agentrl"},
    "envs": {"agentrl", "tools"},
    "rollout": {"agentrl"},
    "train": {"agentrl"},
}
TORCH_OUTSIDE_TRAIN = {
    "rollout/engines/local.py",
    "rollout/engines/local_kv.py",
    "rollout/engines/local_linear.py",
    "rollout/engines/local_load.py",
    "rollout/engines/local_sampling.py",
}


def files_of(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imports(tree: ast.AST, package: tuple[str, ...] = ()) -> set[str]:
    """The full names of the modules that `tree` imports; `package` resolves relative ones."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            names.add(".".join([*above, *filter(None, [node.module])]))
    return names


def imported_rooms_and_libraries(path: Path) -> set[str]:
    package = path.relative_to(ROOT).parent.parts
    return {name.split(".")[0] for name in imports(ast.parse(path.read_text()), package)}


def at_import_time(tree: ast.Module) -> ast.Module:
    """The module without the bodies of its functions."""

    class DropFunctions(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                return None
            return self.generic_visit(node)

    return DropFunctions().visit(tree)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_the_rooms_below_it(room):
    assert files_of(room), f"{room}/ is empty"
    forbidden = (MAY_IMPORT.keys() | {"doctor"}) - MAY_IMPORT[room] - {room}
    broken = {
        str(path.relative_to(ROOT)): found
        for path in files_of(room)
        if (found := imported_rooms_and_libraries(path) & forbidden)
    }
    assert not broken


def test_torch_is_imported_in_train_and_the_local_engine_alone():
    for room in MAY_IMPORT.keys() - {"train"}:
        for path in files_of(room):
            name = str(path.relative_to(ROOT))
            if name not in TORCH_OUTSIDE_TRAIN:
                assert "torch" not in imported_rooms_and_libraries(path), name


def test_the_ground_imports_transformers_inside_functions_only():
    for path in files_of("agentrl"):
        tree = at_import_time(ast.parse(path.read_text()))
        heavy = {name.split(".")[0] for name in imports(tree)} & {"transformers", "datasets"}
        assert not heavy, path


def test_the_law_sees_relative_and_lazy_imports():
    source = "def f():\n    import torch\n    from ..tools import sql\n"
    assert imports(ast.parse(source), ("envs", "adapters")) == {"torch", "envs.tools"}
    assert imports(at_import_time(ast.parse(source)), ("envs", "adapters")) == set()
