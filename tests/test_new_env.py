"""`python -m envs new`: what it writes works as it is, and overwrites nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from envs.__main__ import main

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_new_env_is_short_passes_its_test_and_every_check(
    here: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["new", "letter_count"]) == 0
    assert len((here / "letter_count.py").read_text().splitlines()) < 40
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_letter_count.py"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert tested.returncode == 0, tested.stdout
    assert "2 passed" in tested.stdout
    assert main(["check", "letter_count.py:LetterCount"]) == 0
    assert "all passed" in capsys.readouterr().out


@pytest.mark.parametrize("taken", ["mine.py", "test_mine.py"])
def test_nothing_is_overwritten(here: Path, taken: str, capsys: pytest.CaptureFixture[str]):
    (here / taken).write_text("dear to me")
    assert main(["new", "mine"]) == 2
    assert f"there is a {taken} already" in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == [taken]
    assert (here / taken).read_text() == "dear to me"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("My-Env", "write it like my_env"),
        ("../escape", "write it like my_env"),
        ("class", "write it like my_env"),
        ("random", "there is a module random already"),
        ("numpy", "there is a module numpy already"),
    ],
)
def test_a_name_must_fit_a_module_and_hide_none(
    here: Path, name: str, said: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["new", name]) == 2
    assert said in capsys.readouterr().err
    assert list(here.iterdir()) == []
