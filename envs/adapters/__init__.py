"""Other libraries' environments as envs over text, each named by a scheme."""

import importlib
from functools import cache
from typing import Any

from agentrl.env import EnvNotFound
from envs.adapters.randomness import global_state_kept

REQUIRES = {  # scheme: the module that must be there, and the extra that installs it
    "rg": ("reasoning_gym", "reasoning-gym"),
    "ta": ("textarena", "textarena"),
    "verifiers": ("verifiers", "verifiers"),
    "mcp": ("mcp", "mcp"),
}

EXAMPLES = {
    "gym": "gym:FrozenLake-v1?is_slippery=false",
    "rg": "rg:gsm_symbolic?size=500",
    "ta": "ta:GuessTheNumber-v0",
    "openenv": "openenv:http://localhost:8000",
    "verifiers": "verifiers:my-taskset",
    "mcp": "mcp:uvx mcp-server-time?tasks=rows.jsonl",
}


@cache  # while it keeps the global random state, no other thread may draw from it
def library(scheme: str, module: str | None = None) -> Any:
    """The library that the envs of `scheme` come from, or a module of it.

    Raises:
        EnvNotFound: it is not installed; says what to type.
    """
    name, extra = REQUIRES[scheme]
    try:
        with global_state_kept():
            return importlib.import_module(module or name)
    except ModuleNotFoundError as error:
        raise EnvNotFound(
            f"envs of {scheme}: need the library {name} ({error}): pip install -e '.[{extra}]'"
        ) from error
