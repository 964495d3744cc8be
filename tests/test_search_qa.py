"""Search-QA: answers that are in the corpus, and nothing but the answer is right."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from agentrl.types import Action
from envs.search_qa import SearchQA
from tests.solving import play

pytest.importorskip("bm25s")


@pytest.fixture(scope="module")
def env() -> SearchQA:
    return SearchQA()


def score(env: SearchQA, index: int, text: str) -> float:
    task = env.tasks("train")[index]
    return asyncio.run(play(env, task, [Action(text)]))[0]["exact_match"]


def test_gold_solutions_find_their_documents_and_earn_the_full_reward(env: SearchQA):
    for task in [*env.tasks("train")[:60], *env.tasks("test")[:60]]:
        rewards, tape = asyncio.run(play(env, task, env.gold(task)))
        assert rewards == {
            "exact_match": 1.0,
            f"exact_match/{task.info['steps']}_step": 1.0,
            "called_tool": 1.0,
        }
        opened = [m.content for m in tape.messages if m.name == "open_document"]
        assert task.answer[0] in opened[-1]
        found = [m.content for m in tape.messages if m.name == "search"][1:]
        for document, hits in zip(task.info["documents"], found, strict=True):
            assert f"[{document['id']}] {document['title']}" in hits


def test_splits_are_disjoint_and_hold_both_kinds_of_questions(env: SearchQA):
    asked = {s: {t.prompt[0].content for t in env.tasks(s)} for s in ("train", "test")}
    assert (len(asked["train"]), len(asked["test"])) == (1595, 185)
    assert not asked["train"] & asked["test"]
    assert {task.info["steps"] for task in env.tasks("test")} == {1, 2}
    with pytest.raises(ValueError, match="no split 'dev'"):
        env.tasks("dev")


def test_no_question_has_two_answers(env: SearchQA):
    texts = [t.prompt[0].content for s in ("train", "test") for t in env.tasks(s)]
    assert len(texts) == len(set(texts))


def test_the_answer_is_matched_as_words_and_not_in_part(env: SearchQA):
    task = env.tasks("train")[0]
    gold = task.answer[0]
    assert score(env, 0, f"It says so.\nAnswer: {gold}.") == 1.0
    assert score(env, 0, gold.upper()) == 1.0
    assert score(env, 0, f'Answer: x\nAnswer: "{gold}"\nThat is all.') == 1.0
    assert score(env, 0, f"I think that it is {gold}") == 0.0
    assert score(env, 0, f"Answer: {gold} or another") == 0.0
    assert score(env, 0, f"Answer: {gold}\nAnswer: another") == 0.0
    for nothing in ("", "Answer:", "Answer: .", "\udcff"):
        assert score(env, 0, nothing) == 0.0


def test_an_own_corpus_and_its_questions_are_read(tmp_path: Path):
    corpus, path = tmp_path / "corpus.jsonl", tmp_path / "questions.jsonl"
    corpus.write_text('{"id": 1, "title": "Ada", "text": "Ada wrote the first program."}\n')
    path.write_text(json.dumps({"question": "Who?", "answer": ["Ada", "Ada Lovelace"]}) + "\n")
    env = SearchQA(corpus=str(corpus), path=str(path))
    (task,) = env.tasks("test")
    assert score(env, 0, "Answer: the Ada Lovelace") == 1.0
    assert asyncio.run(play(env, task, env.gold(task)))[0]["exact_match"] == 1.0
    with pytest.raises(ValueError, match="give both, or none"):
        SearchQA(corpus=str(corpus))


@pytest.mark.parametrize(
    "row", ['{"question": "Who?"}', '{"question": "Who?", "answer": []}', "[]"]
)
def test_a_bad_line_is_named(tmp_path: Path, row: str):
    (tmp_path / "corpus.jsonl").write_text('{"id": 1, "text": "Ada wrote."}\n')
    (tmp_path / "train.jsonl").write_text(row + "\n")
    env = SearchQA(corpus=str(tmp_path / "corpus.jsonl"), path=str(tmp_path))
    with pytest.raises(ValueError, match=r"train\.jsonl:1: a row must be"):
        env.tasks("train")


def test_the_demonstration_shows_what_the_tools_say():
    """The form of their answers, on a corpus that has the document."""
    from tools.search import Corpus

    _, searching, found, opening, page, _ = SearchQA.demonstrations[0]
    text = "The bridge of Altmore has five arches. It was built in 1741."
    corpus = Corpus.build([{"id": "place-3", "title": "Bridge of Altmore", "text": text}])
    search, open_document = corpus.tools()
    said = asyncio.run(search(searching.tool_calls[0].arguments)).content
    assert said.startswith(found.content.removesuffix("…"))
    assert asyncio.run(open_document(opening.tool_calls[0].arguments)).content == page.content
