"""Reinforcement learning of language-model agents that use tools over many turns.

What an author of environments needs; it imports no torch.
"""

from agentrl.env import Blocking, EnvNotFound, TextEnv, make_env
from agentrl.rubric import Rubric
from agentrl.tool import Tool, Unavailable, tool
from agentrl.trajectory import Trajectory, TrajectoryGroup
from agentrl.types import Action, Completion, Message, StopReason, Task, ToolCall

__version__ = "0.1.0"

__all__ = [
    "Action",
    "Blocking",
    "Completion",
    "EnvNotFound",
    "Message",
    "Rubric",
    "StopReason",
    "Task",
    "TextEnv",
    "Tool",
    "ToolCall",
    "Trajectory",
    "TrajectoryGroup",
    "Unavailable",
    "__version__",
    "make_env",
    "tool",
]
