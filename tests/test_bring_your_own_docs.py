"""The page docs/bring_your_own_environment.md: what stands in it works, in the order it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.config_file import load_config
from agentrl.env import schemes
from tests.sandboxes import require_level
from tools.sandbox.protocol import SandboxConfig

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "bring_your_own_environment.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, flags=re.M | re.S)
ROOMS = ["agentrl", "envs", "tools", "rollout", "train", "train.py", "parts.py", "doctor.py"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that is a checkout to commands, and in which they may write."""
    for name in ROOMS:
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run(command: list[str], checkout: Path) -> str:
    folder = Path(sys.executable).parent
    done = subprocess.run(
        command,
        cwd=checkout,
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(checkout)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}"
    return done.stdout


def test_every_block_of_the_page_works_in_order(checkout: Path):
    require_level(SandboxConfig(level="bubblewrap"))
    output = []
    for language, block in BLOCKS:
        named = re.match(r"# file: (\S+)\n", block)
        if named:
            (checkout / named[1]).write_text(block)
            if language == "yaml":
                load_config(checkout / named[1])
        elif language == "python":
            output.append(run([sys.executable, "-c", block], checkout))
        elif language == "sh":
            output += [run(["bash", "-c", line], checkout) for line in block.splitlines()]
    told = "\n".join(output)
    assert told.count("checks, all passed") == 4
    assert "{'correct': 1.0}" in told
    assert "   reward: 1\n" in told
    assert told.count(": fits") == 1


def test_the_table_has_a_row_for_each_scheme():
    rows = re.findall(r"^\| `(\w+):[^`]+` \|", PAGE, flags=re.M)
    assert set(schemes()) <= set(rows)


def test_the_page_says_what_each_check_looks_for():
    source = (ROOT / "envs" / "cli" / "check.py").read_text(encoding="utf-8")
    for name in re.findall(r'checks\.check\("([\w ]+)"\)', source):
        assert f"| {name} |" in PAGE
