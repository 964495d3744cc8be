"""`list`: the envs that can be named, each with a line."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import gymnasium

from agentrl.env import schemes, third_party
from envs.adapters import EXAMPLES, REQUIRES


def print_catalog() -> None:
    print("Envs of this project:")
    described: set[str] = set()
    for id in sorted(id for id in gymnasium.registry if id.startswith("agentrl/")):
        entry_point = str(gymnasium.registry[id].entry_point)
        print(f"  {id:<28} {_line_about(entry_point, described)}")
    print("\nEnvs of other libraries, by scheme:")
    for scheme in schemes():
        example = EXAMPLES.get(scheme, f"{scheme}:…")
        module, extra = REQUIRES.get(scheme, ("agentrl", ""))
        missing = "" if find_spec(module) else f"pip install -e '.[{extra}]'"
        print(f"  {example:<44} {missing or 'installed'}")
    print("\nEnvs of installed packages (entry-point group agentrl.envs):")
    for name, entries in sorted(third_party().items()):
        owners = ", ".join(str(entry.dist and entry.dist.name) for entry in entries)
        print(f"  {name:<28} {owners}: {entries[0].value}")
    if not third_party():
        print("  none")
    print(
        "\nYour own: package.module:Class, or path/to/file.py:Class. Begin one: python -m envs new"
    )


def _line_about(entry_point: str, described: set[str]) -> str:
    """What its module says of itself; the class, where the module is another's or an adapter."""
    module_name, _, name = entry_point.partition(":")
    module = importlib.import_module(module_name)
    own = vars(getattr(module, name)).get("__doc__")
    of_module = module_name not in described and not module_name.startswith("envs.adapters.")
    described.add(module_name)
    return str(module.__doc__ if of_module or not own else own).strip().partition("\n")[0]
