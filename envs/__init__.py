"""Environments, registered with gymnasium as `agentrl/<Name>-v<N>`."""

import gymnasium

for _id, _entry_point in {
    "agentrl/Arithmetic-v0": "envs.arithmetic:Arithmetic",
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
