"""Shell: the files as they are in the end are what counts, read by none but the sandbox."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from agentrl.rubric import RewardError
from agentrl.trajectory import Trajectory
from agentrl.types import Action, Task
from envs.gold import calling
from envs.shell_problems import FAMILIES, make_problem
from envs.shell_tasks import ShellTasks
from tests.sandboxes import LoopThread, require_level
from tests.solving import last_result, play
from tools.sandbox.protocol import SandboxConfig

DONE = Action("Done.")


@pytest.fixture(scope="module")
def env(sandbox_loop: LoopThread) -> Iterator[ShellTasks]:
    require_level(SandboxConfig(level="bubblewrap"))
    yield ShellTasks(sandbox={"level": "bubblewrap"})


def task_of(env: ShellTasks, family: str) -> Task:
    return next(task for task in env.tasks("train") if task.info["family"] == family)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gold_solution_earns_the_full_reward_and_idleness_nothing(
    env: ShellTasks, sandbox_loop: LoopThread, family: str
):
    task = task_of(env, family)
    rewards, _ = sandbox_loop.run(play(env, task, env.gold(task)))
    assert rewards == {"solved": 1.0, f"solved/{family}": 1.0}
    rewards, _ = sandbox_loop.run(play(env, task, [DONE]))
    assert rewards["solved"] == 0.0


def test_splits_are_disjoint_and_of_each_family_as_large(env: ShellTasks):
    problems = {}
    for split, size in (("train", 1200), ("test", 120)):
        tasks = env.tasks(split)
        assert len(tasks) == size
        assert all(
            sum(t.info["family"] == family for t in tasks) == size / len(FAMILIES)
            for family in FAMILIES
        )
        made = [make_problem(**task.info) for task in tasks]
        problems[split] = {repr((p.question, p.files)) for p in made}
        assert len(problems[split]) == size
    assert not problems["train"] & problems["test"]
    with pytest.raises(ValueError, match="no split 'dev'"):
        env.tasks("dev")


def test_no_problem_is_solved_before_it_begins():
    for family in FAMILIES:
        for seed in range(60):
            problem = make_problem(family, str(seed))
            ended = all(problem.files.get(path) == end for path, end in problem.end.items())
            assert problem.answer is not None or not ended


def test_the_same_seed_makes_the_same_problem():
    assert make_problem("rename", "7") == make_problem("rename", "7")
    assert make_problem("rename", "7") != make_problem("rename", "8")


def solved(
    env: ShellTasks, loop: LoopThread, family: str, commands: Sequence[str], last: Action = DONE
) -> float:
    turns = [calling("shell", command=command) for command in commands]
    return loop.run(play(env, task_of(env, family), [*turns, last]))[0]["solved"]


def test_files_must_be_as_wanted_whatever_stands_there_instead(
    env: ShellTasks, sandbox_loop: LoopThread
):
    """A folder, a link that leads out, a file that may not be read: no solution, no fault."""
    problem = make_problem(**task_of(env, "extract_lines").info)
    for instead in (
        "mkdir found.txt",
        "ln -s /etc/passwd found.txt",
        f"({problem.command}); chmod 0 found.txt",
        "ln -s found.txt found.txt",
        "printf '\\377' > found.txt",
        "mkfifo found.txt",
    ):
        assert solved(env, sandbox_loop, "extract_lines", [instead]) == 0.0, instead
    assert solved(env, sandbox_loop, "extract_lines", [f"{problem.command}; pwd"]) == 1.0


def test_what_should_stay_must_stay(env: ShellTasks, sandbox_loop: LoopThread):
    assert solved(env, sandbox_loop, "delete_empty", ["rm -r *"]) == 0.0
    copying = make_problem(**task_of(env, "rename").info).command.replace("mv ", "cp ")
    assert solved(env, sandbox_loop, "rename", [copying]) == 0.0


def test_programs_that_the_policy_replaced_judge_nothing(env: ShellTasks, sandbox_loop: LoopThread):
    family = "fix_config"
    wanted = next(iter(make_problem(**task_of(env, family).info).end.values()))
    fake = f"mkdir -p bin; printf '#!/bin/sh\\necho {wanted!r}' > bin/cat; chmod +x bin/cat"
    hostile = [f"{fake}; export PATH=$PWD/bin:$PATH", "kill -9 -1; kill -9 1"]
    assert solved(env, sandbox_loop, family, hostile) == 0.0


def test_an_answer_is_needed_where_one_is_asked_for(env: ShellTasks, sandbox_loop: LoopThread):
    problem = make_problem(**task_of(env, "count_lines").info)
    for text, reward in {
        f"Answer: {problem.answer}": 1.0,
        f"There are {problem.answer} lines.": 1.0,
        f"Answer: {problem.answer}0": 0.0,
        "Answer:": 0.0,
        "Done.": 0.0,
    }.items():
        assert solved(env, sandbox_loop, "count_lines", [], Action(text)) == reward


def test_the_demonstrations_show_what_the_shell_says(env: ShellTasks, sandbox_loop: LoopThread):
    made = ["mkdir data && touch data/1.csv data/2.csv data/3.csv", "touch old.txt && rm -r data"]
    for making, (_, calling_turn, result, _) in zip(made, env.demonstrations, strict=True):
        turns = [calling("shell", **calling_turn.tool_calls[0].arguments)]
        empty = "rm -rf * .[a-z]*"
        task = task_of(env, "fix_config")
        before = calling("shell", command=f"{empty}; {making}")
        _, tape = sandbox_loop.run(play(env, task, [before, *turns]))
        assert last_result(tape) == result.content


def test_a_lost_sandbox_is_a_fault_and_no_zero(env: ShellTasks, sandbox_loop: LoopThread):
    """F052."""
    task = task_of(env, "rename")

    async def lose() -> None:
        await env.acquire()
        await env.reset(seed=0, options={"task": task})
        await env.lease.sandbox.close()
        try:
            await env.rubric.score(task=task, trajectory=Trajectory(id="e"), env=env)
        finally:
            await env.close()

    with pytest.raises(RewardError, match="SandboxUnavailable"):
        sandbox_loop.run(lose())


def test_white_space_at_the_end_of_a_file_does_not_count(env: ShellTasks, sandbox_loop: LoopThread):
    problem = make_problem(**task_of(env, "merge_lists").info)
    name = next(iter(problem.end))
    assert solved(env, sandbox_loop, "merge_lists", [f"{problem.command}; echo >> {name}"]) == 1.0
    first = f"{problem.command}; sed -i '1i\\\\' {name}"
    assert solved(env, sandbox_loop, "merge_lists", [first]) == 0.0
