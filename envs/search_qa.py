"""Search-QA: questions of one and two steps, answered by searching and reading a local corpus."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.rubric import Rubric
from agentrl.threads import inline
from agentrl.types import Action, Message, Task
from envs.answers import is_same, stated_answer
from envs.arithmetic import called_tool
from envs.gold import calling
from envs.made_world import World, documents, make_world, questions
from envs.rows import in_split, require_split, rows_of_split, tasks_of_rows
from envs.tool_env import ToolEnv, demonstration
from tools.search import Corpus

SEED = 0  # of the world that is made where no corpus is given


@inline
def exact_match(messages: Sequence[Message], answer: Sequence[str]) -> bool:
    """Whether what was stated is one of the accepted answers."""
    said = stated_answer(messages)
    return any(is_same(said, accepted) for accepted in answer)


@inline
def exact_match_by_steps(messages: Sequence[Message], task: Task) -> dict[str, bool]:
    if "steps" not in task.info:
        return {}
    return {f"exact_match/{task.info['steps']}_step": exact_match(messages, task.answer)}


class SearchQA(ToolEnv):
    """The reward is 1 where the answer is exactly one of the accepted ones, else 0.

    The answer is what follows "Answer:" in the final message, or all of it. Case, punctuation
    around it and a leading article do not count; numbers are compared as numbers.
    """

    system_prompt = (
        "Find the answer with search and open_document; a question may need two documents. "
        "End with: Answer: the answer, and no other word"
    )
    demonstrations = (
        demonstration(
            "In which year was the bridge of Altmore built?",
            [
                (
                    "search",
                    {"query": "bridge of Altmore"},
                    "[place-3] Bridge of Altmore\nThe bridge of Altmore has five arches. It was…",
                ),
                (
                    "open_document",
                    {"id": "place-3"},
                    "Bridge of Altmore (page 1 of 1)\n"
                    "The bridge of Altmore has five arches. It was built in 1741.",
                ),
            ],
            "Answer: 1741",
        ),
    )
    rubric = Rubric([exact_match, exact_match_by_steps, called_tool], weights=[1.0, 0.0, 0.0])

    def __init__(
        self, *, corpus: str | None = None, path: str | None = None, **limits: Any
    ) -> None:
        """
        Args:
            corpus: A file whose lines are {"id", "title", "text"}. None: a small made world.
            path: The questions on that corpus: a folder with train.jsonl and test.jsonl, or one
                file, which then is every split; each line is {"question": text, "answer": text, or
                a list of accepted ones}.
            limits: As `ToolEnv` takes them.

        Raises:
            EnvNotFound: the package bm25s is not installed.
        """
        if (corpus is None) != (path is None):
            raise ValueError("corpus and path belong together: give both, or none")
        super().__init__(**limits)
        self.path = path
        self.tools = (_made_corpus() if corpus is None else Corpus.load(corpus)).tools()

    def tasks(self, split: str) -> Sequence[Task]:
        """About 1,600 training and 180 test questions on the made world, or those of `path`.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: there is no such split, or a line that is no question, by file and line.
        """
        require_split(split)
        return _made_tasks(split) if self.path is None else _tasks_of_file(self.path, split)

    def gold(self, task: Task) -> list[Action]:
        """Turns that earn the full reward: the documents, where they are known, and the answer."""
        turns = []
        for document in task.info.get("documents", ()):
            turns += [
                calling("search", query=document["title"]),
                calling("open_document", id=document["id"]),
            ]
        return [*turns, Action(f"Answer: {task.answer[0]}")]


@cache
def _world() -> World:
    return make_world(SEED)


@cache
def _made_corpus() -> Corpus:
    return Corpus.build(documents(_world()))


@cache
def _made_tasks(split: str) -> tuple[Task, ...]:
    ids = {document["title"]: document["id"] for document in documents(_world())}
    asked = [question for question in questions(_world()) if in_split(question.text, split)]
    random.Random(split).shuffle(asked)
    return tuple(
        Task(
            id=f"search-{split}-{index}",
            prompt=(Message(role="user", content=question.text),),
            answer=(question.answer,),
            info={
                "steps": len(question.path),
                "documents": [{"id": ids[title], "title": title} for title in question.path],
            },
        )
        for index, question in enumerate(asked)
    )


@cache
def _tasks_of_file(path: str, split: str) -> tuple[Task, ...]:
    return tasks_of_rows(rows_of_split(Path(path), split), f"search-{split}", _task)


def _task(row: Any, *, id: str, where: str) -> Task:
    answers = row.get("answer") if isinstance(row, dict) else None
    answers = [answers] if isinstance(answers, str) else answers
    if (
        not isinstance(answers, list)
        or not answers
        or not all(isinstance(answer, str) and answer.strip() for answer in answers)
        or not isinstance(row.get("question"), str)
    ):
        raise ValueError(
            f'{where}: a row must be {{"question": text, "answer": text, or a list of texts}}'
        )
    question = Message(role="user", content=row["question"])
    return Task(id=id, prompt=(question,), answer=tuple(answers))
