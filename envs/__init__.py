"""Environments, registered with gymnasium as `agentrl/<Name>-v<N>`."""

import gymnasium

from agentrl.env import register_scheme

for _scheme, _adapter in {
    "gym": "envs.adapters.gym:GymText",
    "rg": "envs.adapters.reasoning_gym:ReasoningGym",
    "ta": "envs.adapters.textarena:TextArena",
    "openenv": "envs.adapters.openenv:OpenEnv",
    "verifiers": "envs.adapters.verifiers:Verifiers",
    "mcp": "envs.adapters.mcp:MCPEnv",
}.items():
    register_scheme(_scheme, _adapter)

for _id, _entry_point in {
    "agentrl/Arithmetic-v0": "envs.arithmetic:Arithmetic",
    "agentrl/ArithmeticPython-v0": "envs.arithmetic:ArithmeticPython",
    "agentrl/Blackjack-v0": "envs.adapters.gym:Blackjack",
    "agentrl/FrozenLake-v0": "envs.adapters.gym:FrozenLake",
    "agentrl/GSM8K-v0": "envs.gsm8k:GSM8K",
    "agentrl/GSM8KPython-v0": "envs.gsm8k:GSM8KPython",
    "agentrl/HumanEval-v0": "envs.human_eval:HumanEval",
    "agentrl/SearchQA-v0": "envs.search_qa:SearchQA",
    "agentrl/Shell-v0": "envs.shell_tasks:ShellTasks",
    "agentrl/Shopping-v0": "envs.shopping:Shopping",
    "agentrl/TextToSQL-v0": "envs.text_to_sql:TextToSQL",
}.items():
    # The checkers' wrappers would take an async step's coroutine for a malformed result.
    gymnasium.register(
        id=_id, entry_point=_entry_point, order_enforce=False, disable_env_checker=True
    )
