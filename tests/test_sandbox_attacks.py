"""What code in a sandbox may try, a property a test, on each level that claims to withstand it."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.processes import assert_gone, descendants
from tests.sandboxes import Leased, LoopThread, eventually, process_of
from tools.sandbox.pool import Lease
from tools.sandbox.protocol import SandboxConfig, SandboxUnavailable
from tools.sandbox.spawner import find_cgroups

BOMB = "f() { f | f & }; f; sleep 60"
COMMANDS = "for file in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $file; echo; done 2>/dev/null"
WRITE_TO_ALL = """
import os
for fd in range(3, 100):
    try: os.write(fd, DATA)
    except OSError: pass
"""


@pytest.fixture
def isolated(sandbox: Leased, sandbox_config: SandboxConfig) -> Leased:
    """A sandbox of a level that claims isolation, which `process` does not."""
    if sandbox_config.level == "process":
        pytest.skip("the level process claims no isolation")
    return sandbox


def count_processes(sandbox: Leased) -> int:
    """Of this machine: those of this test and of its sandboxes, at least."""
    if sandbox.lease.config.level != "docker":
        return len(descendants())
    uids = [p.info["uids"] for p in psutil.process_iter(["uids"])]
    return sum(uid is not None and uid.real == 65534 for uid in uids)


def test_a_fork_bomb_stays_within_its_limit_and_is_cleaned_up(sandbox: Leased) -> None:
    """F099."""
    before, start = count_processes(sandbox), time.monotonic()
    with ThreadPoolExecutor() as threads:
        bomb = threads.submit(sandbox.exec, BOMB, timeout=0.5)
        most = before
        while not bomb.done():
            most = max(most, count_processes(sandbox))
            time.sleep(0.02)
    assert 20 < most - before < 80
    assert sandbox.exec("echo alive").stdout == "alive\n"
    assert eventually(lambda: count_processes(sandbox) < before + 10)
    assert time.monotonic() - start < 5


def test_forks_of_python_stay_within_the_limit(sandbox: Leased) -> None:
    """F099."""
    before = count_processes(sandbox)
    code = "import os, time\nfor _ in range(1000):\n if os.fork() == 0: time.sleep(60)"
    result = sandbox.python(code, timeout=1)
    assert "BlockingIOError" in result.stderr
    assert count_processes(sandbox) - before < 80
    assert sandbox.python("1 + 1").stdout == "2\n"


def test_too_much_memory_is_an_error_that_the_code_sees(sandbox: Leased) -> None:
    """F099."""
    result = sandbox.python("kept = 1\nx = bytearray(4 << 30)")
    assert result.stderr.endswith("MemoryError\n")
    assert sandbox.python("kept").stdout == "1\n"


def test_a_memory_bomb_of_many_processes_is_killed(
    sandbox: Leased, sandbox_config: SandboxConfig
) -> None:
    """F099."""
    half = sandbox_config.memory_mb << 19
    hog = f"python3 -c 'x = b\"x\" * {half}; import time; time.sleep(0.5); print(1)'"
    result = sandbox.exec(f"{hog} & {hog} & {hog} & wait", timeout=10)
    assert result.stdout.count("1") < 3
    assert sandbox.exec("echo alive").stdout == "alive\n"


def test_a_full_disk_is_an_error_that_the_code_sees(
    isolated: Leased, sandbox_config: SandboxConfig
) -> None:
    for folder in (".", "/tmp", "/dev/shm"):
        result = isolated.exec(f"for i in 1 2 3; do head -c 9M /dev/zero > {folder}/$i; done")
        assert "No space left on device" in result.stderr
    with pytest.raises(OSError, match="No space left"):
        isolated.write_file("more", b"x" * (1 << 20))
    isolated.exec("rm 1 2 3")
    isolated.write_file("more", b"x")


def test_one_file_has_a_limit(sandbox: Leased) -> None:
    result = sandbox.exec("head -c 40M /dev/zero > big; stat -c %s big")
    assert int(result.stdout) <= 16 << 20


def test_nothing_outside_of_the_work_folders_can_be_written(isolated: Leased) -> None:
    """F102."""
    folders = "/ /usr /etc /dev /proc/sys /var /home /root"
    result = isolated.exec(f'for d in {folders}; do echo x > "$d/attack" && echo "wrote $d"; done')
    assert result.stdout == ""


def test_endless_output_is_stopped_and_its_middle_left_out(sandbox: Leased) -> None:
    """F100."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = sandbox.exec("yes", timeout=20)
    assert result.truncated
    assert not result.timed_out
    assert len(result.stdout) <= (64 << 10) + 40
    assert "bytes left out" in result.stdout
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10  # KiB
    assert "yes" not in sandbox.exec(COMMANDS).stdout.split()


def test_endless_output_of_python_leaves_its_variables(sandbox: Leased) -> None:
    """F100."""
    result = sandbox.python("kept = 1\nwhile True: print('y' * 10000)", timeout=20)
    assert result.truncated
    assert not result.timed_out
    assert sandbox.python("kept").stdout == "1\n"


def test_a_long_line_of_output_is_cut_too(sandbox: Leased) -> None:
    """F100."""
    result = sandbox.python("'x' * 10_000_000")
    assert result.truncated
    assert len(result.stdout) <= (64 << 10) + 40


@pytest.mark.parametrize(
    "escape",
    [
        "setsid sleep 1234567 & sleep 1234567",
        "(setsid sh -c 'sleep 1234567 &' &) ; sleep 1234567",
        "nohup sleep 1234567 >/dev/null 2>&1 & sleep 1234567",
        "trap '' TERM INT HUP; setsid sh -c \"trap '' TERM INT HUP; sleep 1234567\"; sleep 1234567",
    ],
    ids=["setsid", "double fork", "nohup", "ignores signals"],
)
def test_no_process_survives_a_time_out(sandbox: Leased, escape: str) -> None:
    """F097."""
    result = sandbox.exec(escape, timeout=0.4)
    assert result.timed_out
    assert result.exit_code == -9
    assert "1234567" not in sandbox.exec(COMMANDS).stdout


def test_code_that_ignores_its_interrupt_is_killed(sandbox: Leased) -> None:
    code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('a')\nwhile True: 0"
    result = sandbox.python(code, timeout=0.3)
    assert (result.timed_out, result.lost_state, result.stdout) == (True, True, "a\n")
    assert sandbox.python("1").stdout == "1\n"


def test_twenty_time_outs_leave_as_many_processes_as_before(sandbox: Leased) -> None:
    """F097."""
    sandbox.write_file("kept", "here")
    mine = 'for p in /proc/[0-9]*; do stat -c %u $p; done 2>/dev/null | grep -c "^$(id -u)$"'
    before = int(sandbox.exec(mine).stdout)
    for _ in range(20):
        assert sandbox.exec("sleep 60 & sleep 60", timeout=0.05).timed_out
    assert abs(int(sandbox.exec(mine).stdout) - before) <= 2  # of the pipeline that counts
    assert sandbox.read_file("kept") == b"here"


def test_output_so_far_survives_a_time_out(sandbox: Leased) -> None:
    """F106."""
    assert sandbox.exec("echo a; sleep 60", timeout=0.3).stdout == "a\n"
    result = sandbox.python("print('a')\nwhile True: pass", timeout=0.3)
    assert (result.stdout, result.timed_out, result.lost_state) == ("a\n", True, False)


def test_the_environment_holds_nothing_of_the_trainers(
    sandbox_config: SandboxConfig, sandbox_loop: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F102."""
    monkeypatch.setenv("SECRET_OF_THE_TRAINER", "swordfish")
    sandbox = Leased(sandbox_loop, sandbox_config.model_copy(update={"warm": 0}))
    try:
        seen = sandbox.python(
            "import os, glob\nprint(os.environ)\n"
            "for name in glob.glob('/proc/*/environ'):\n"
            "    try: print(open(name).read())\n"
            "    except OSError: pass\n"
            "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == '_wrap_close'][0]"
            ".__init__.__globals__['environ']"
        )
    finally:
        sandbox.release()
    assert "PATH" in seen.stdout
    assert "swordfish" not in seen.stdout + seen.stderr


def test_files_of_the_host_cannot_be_read(isolated: Leased, tmp_path: Path) -> None:
    """F102."""
    secret = tmp_path / "secret"
    secret.write_text("swordfish")
    secret.chmod(0o644)
    paths = f"{secret} {Path(__file__)} /proc/1/root{secret} /etc/shadow /root/.profile"
    assert isolated.exec(f"cat {paths}").stdout == ""
    folders = [Path("/root"), Path("/home"), Path("/mnt"), tmp_path.parent]
    names = {path.name for folder in folders if folder.is_dir() for path in folder.iterdir()}
    listed = isolated.exec(f"cat /etc/hostname; ls -A {' '.join(map(str, folders))}").stdout
    assert not {*names, socket.gethostname()} & set(listed.split())


def test_other_sandboxes_are_out_of_sight(
    isolated: Leased, sandbox_config: SandboxConfig, sandbox_loop: LoopThread
) -> None:
    other = Leased(sandbox_loop, sandbox_config)
    try:
        other.write_file("secret", "swordfish")
        other.exec(
            "echo swordfish > /tmp/secret; echo swordfish > /dev/shm/secret; sleep 7654321 &"
        )
        assert isolated.exec("grep -r swordfish /work /tmp /dev/shm").stdout == ""
        assert "7654321" in other.exec(COMMANDS).stdout
        assert "7654321" not in isolated.exec(COMMANDS).stdout
    finally:
        other.release()


def test_nothing_of_a_trajectory_is_left_by_a_reset(sandbox: Leased) -> None:
    sandbox.write_file("secret", "swordfish")
    sandbox.python("secret = 'swordfish'")
    sandbox.exec("sleep 7654321 &")
    sandbox.reset()
    assert sandbox.exec("cat secret").stdout == ""
    assert "7654321" not in sandbox.exec(COMMANDS).stdout
    assert "NameError" in sandbox.python("secret").stderr


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "link/passwd", "file", "a/../../x"])
def test_file_operations_stay_in_the_work_folder(sandbox: Leased, path: str) -> None:
    sandbox.exec("mkdir a; ln -s /etc link; ln -s /etc/passwd file")
    with pytest.raises(PermissionError, match="outside"):
        sandbox.read_file(path)
    with pytest.raises(PermissionError, match="outside"):
        sandbox.write_file(path, "x")


def test_file_operations_do_not_wait_for_pipes_or_devices(sandbox: Leased) -> None:
    sandbox.exec("mkfifo pipe; mkdir folder")
    with pytest.raises(OSError, match="not a regular file"):
        sandbox.read_file("pipe")
    with pytest.raises(OSError, match="pipe"):
        sandbox.write_file("pipe", "x")
    with pytest.raises(IsADirectoryError):
        sandbox.read_file("folder")


def test_there_is_no_network_and_no_loopback_of_the_host(isolated: Leased) -> None:
    """F102."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.3)
        port = server.getsockname()[1]
        code = (
            "import socket\n"
            f"for address in [('127.0.0.1', {port}), ('1.1.1.1', 53), ('169.254.169.254', 80)]:\n"
            "    try: socket.create_connection(address, 1); print('connected')\n"
            "    except OSError as error: print('refused')\n"
            "print([name for _, name in socket.if_nameindex() if name.startswith('eth')])"
        )
        assert isolated.python(code).stdout == "refused\nrefused\nrefused\n[]\n"
        with pytest.raises(TimeoutError):
            server.accept()


def test_sockets_of_the_host_are_out_of_reach(isolated: Leased, tmp_path: Path) -> None:
    """F102: neither those in files, such as a daemon's, nor those with abstract names."""
    name = f"agentrl-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen()
        code = f"import socket\nsocket.socket(socket.AF_UNIX).connect('\\0{name}')"
        assert "ConnectionRefusedError" in isolated.python(code).stderr
    assert isolated.exec("ls /run/docker.sock /var/run/docker.sock").stdout == ""


def test_processes_of_the_host_are_out_of_sight(isolated: Leased) -> None:
    pids = isolated.exec("cat /proc/[0-9]*/comm | sort | uniq -c").stdout
    assert sum(int(line.split()[0]) for line in pids.splitlines()) < 10
    assert isolated.exec(f"kill -9 {os.getpid()}; kill -9 -1; echo").exit_code in (0, -9)


def test_the_worker_cannot_be_read_traced_or_spoken_for(isolated: Leased) -> None:
    for path in ("mem", "environ", "fd/0", "fd/1", "maps", "root/etc/passwd", "cwd/x"):
        assert "Permission denied" in isolated.exec(f"cat /proc/1/{path}").stderr
    code = (
        "import ctypes\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.ptrace(16, 1, 0, 0), ctypes.get_errno())"  # PTRACE_ATTACH: EPERM
    )
    assert isolated.python(code).stdout == "-1 1\n"


def test_signals_do_not_end_the_worker(isolated: Leased) -> None:
    isolated.write_file("kept", "here")
    for number in range(1, 65):
        isolated.exec(f"kill -{number} 1")
    isolated.python(
        "import os\nfor n in range(1, 65):\n  n in (32, 33) or os.kill(os.getppid(), n)"
    )
    assert isolated.read_file("kept") == b"here"


def test_nothing_gives_more_rights(isolated: Leased) -> None:
    status = isolated.exec("cat /proc/self/status").stdout
    for line in ("NoNewPrivs:\t1", "CapEff:\t0000000000000000", "CapPrm:\t0000000000000000"):
        assert line in status
    assert isolated.exec("id -u").stdout != "0\n"
    for command in ("mount -t tmpfs none /work", "/usr/sbin/chroot / true", "mknod x c 1 3"):
        assert isolated.exec(command).exit_code != 0
    result = isolated.python("import os\nos.setuid(0)")
    assert "PermissionError" in result.stderr or "OSError" in result.stderr


def test_huge_input_is_streamed_to_who_reads_it(sandbox: Leased) -> None:
    data = b"x" * 100_000_000
    assert sandbox.exec("wc -c", input=data, timeout=30).stdout == "100000000\n"
    assert sandbox.exec("head -c 1", input=data, timeout=30).stdout == "x"
    assert sandbox.exec("sleep 0.1; echo done", input=data, timeout=30).stdout == "done\n"
    assert sandbox.exec("sleep 60", input=data, timeout=0.3).timed_out
    assert sandbox.exec("cat", input="é").stdout == "é"


def test_bytes_that_are_no_text_are_replaced(sandbox: Leased) -> None:
    """F101."""
    assert sandbox.exec(r"printf '\377\376'").stdout == "\ufffd\ufffd"
    assert sandbox.python("import os\nos.write(1, b'\\xff\\n')\n'\\ud800'").exit_code == 0
    cut = sandbox.python("print('x' + 'é' * 100_000, end='')")
    assert cut.truncated
    assert cut.stdout.count("\ufffd") <= 1


def test_tampering_with_the_interpreters_pipes_ends_only_the_interpreter(sandbox: Leased) -> None:
    attacks = [
        "import os\nos.closerange(0, 500)",
        WRITE_TO_ALL.replace("DATA", "b'x' * 1000"),
        WRITE_TO_ALL.replace("DATA", "b'[0, 1, 2, 3]\\n'"),
        WRITE_TO_ALL.replace("DATA", "b'[%d, 0, 0]\\n' % (fd + 1)"),
        "import os\nos.kill(os.getpid(), 9)",
        "import os\nos._exit(0)",
        "import os, json\njson.dumps = json.loads = os.write = None",
        "import ctypes\nctypes.string_at(0)",
    ]
    for attack in attacks:
        start = time.monotonic()
        sandbox.python(attack, timeout=2)
        sandbox.python("0", timeout=2)
        assert sandbox.python("1 + 1", timeout=2).stdout == "2\n", attack
        assert time.monotonic() - start < 5


def test_sixty_four_use_sandboxes_at_once(
    sandbox_config: SandboxConfig, sandbox_loop: LoopThread
) -> None:
    async def user(lease: Lease, number: int) -> str:
        await lease.acquire()
        try:
            await lease.sandbox.python(f"x = {number}")
            await lease.sandbox.exec("sleep 0.1")
            return (await lease.sandbox.python("x")).stdout
        finally:
            await lease.release()

    async def users() -> list[str]:
        config = sandbox_config.model_copy(update={"max_sandboxes": 16, "starts_per_second": 100})
        return await asyncio.gather(*(user(Lease(config), n) for n in range(64)))

    assert sandbox_loop.run(users()) == [f"{n}\n" for n in range(64)]


OWNER = """
import asyncio, sys
from tools.sandbox.pool import Lease
from tools.sandbox.protocol import SandboxConfig

async def main():
    config = SandboxConfig.model_validate_json(sys.argv[1])
    leases = [Lease(config) for _ in range(3)]
    for lease in leases:
        await lease.acquire()
        await lease.sandbox.exec("echo x > x; sleep 7171717 &")
    print("ready", flush=True)
    await leases[0].sandbox.exec("sleep 7171717", timeout=60)

asyncio.run(main())
"""


def test_a_killed_trainer_leaves_no_process_cgroup_or_folder(
    sandbox_config: SandboxConfig,
) -> None:
    """F098."""
    if sandbox_config.level == "docker":
        pytest.skip("its containers outlive a killed trainer until the next one starts")
    command = [sys.executable, "-c", OWNER, sandbox_config.model_dump_json()]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        processes = descendants(owner.pid)
        [helper] = psutil.Process(owner.pid).children()
        if sandbox_config.level == "process" or find_cgroups() is not None:
            assert traces_of(helper.pid)
        owner.send_signal(signal.SIGKILL)
    assert eventually(lambda: not traces_of(helper.pid))
    assert_gone(processes)


def traces_of(helper: int) -> list[str]:
    """The cgroups and folders of its sandboxes on this machine."""
    bases = {Path(tempfile.gettempdir())}
    if (cgroups := find_cgroups()) is not None:
        bases |= set(cgroups.folders.values())
    return [str(path) for base in bases for path in base.glob(f"agentrl-{helper}-*")]


def test_a_sandbox_that_is_killed_from_outside_is_a_fault_and_no_result(
    isolated: Leased, sandbox_loop: LoopThread
) -> None:
    """F052: it says nothing about the policy."""
    isolated.exec("sleep 6543217 &")
    worker = process_of(["sleep", "6543217"]).parent()  # pid 1 of the sandbox: orphans are its own
    assert worker is not None

    async def attack() -> None:
        call = asyncio.create_task(isolated.lease.sandbox.exec("sleep 60", timeout=50))
        await asyncio.sleep(0.2)
        worker.kill()
        await call

    with pytest.raises(SandboxUnavailable, match="lost"):
        sandbox_loop.run(attack())
    with pytest.raises(SandboxUnavailable):
        isolated.exec("true")
