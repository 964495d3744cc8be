"""The process that starts sandboxes for a trainer, bounds them, and ends them with it.

A trainer may have many GB of memory and must not be forked, and nothing that it starts may outlive
it. So it has this small helper, over a socket of packets on its stdin: each packet is a JSON
object. The trainer sends `start` (with the socket that becomes stdin and stdout of the sandbox) and
`kill`; `started` and `ended` come back. When the trainer is gone, so are the sandboxes, their
cgroups and folders, and at its start the helper removes what a helper left that was killed itself.
It uses the standard library alone, and runs as any user.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import shutil
import signal
import socket
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
SWEEP_S = 10.0
NUM_UIDS = 512  # of a helper, one for each sandbox that lives


@dataclass(frozen=True)
class Cgroups:
    """The folders of this process's cgroups in which others may be made."""

    version: int
    folders: dict[str, Path]  # controller -> folder; in version 2 all the same

    def make(self, name: str, memory: int, processes: int, cpus: float) -> list[Path]:
        """A cgroup with these limits; memory in bytes, cpus in cores."""
        made = list(dict.fromkeys(folder / name for folder in self.folders.values()))
        for path in made:
            path.mkdir(exist_ok=True)
        quota = int(cpus * 100_000)
        if self.version == 1:
            settings = {
                "memory": {"limit_in_bytes": memory, "memsw.limit_in_bytes": memory},
                "pids": {"max": processes},
                "cpu": {"cfs_period_us": 100_000, "cfs_quota_us": quota},
            }
        else:
            settings = {
                "memory": {"max": memory, "swap.max": 0},
                "pids": {"max": processes},
                "cpu": {"max": f"{quota} 100000"},
            }
        for controller, folder in self.folders.items():
            for key, value in settings[controller].items():
                file = folder / name / f"{controller}.{key}"
                if file.exists():  # there is no swap to bound on some machines
                    file.write_text(str(value))
        return made

    def num_oom_kills(self, name: str) -> int:
        file = "memory.oom_control" if self.version == 1 else "memory.events"
        text = (self.folders["memory"] / name / file).read_text()
        found = re.search(r"^oom_kill (\d+)", text, re.M)
        return int(found[1]) if found else 0


def find_cgroups(proc: Path = Path("/proc")) -> Cgroups | None:
    """Where this process may bound memory and number of processes; None: nowhere."""
    mounts, own = [], {}
    for line in (proc / "self/mountinfo").read_text().splitlines():
        left, right = (part.split() for part in line.split(" - ", 1))
        mounts.append((right[0], right[2].split(","), left[3], Path(left[4])))
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    folders: dict[str, Path] = {}
    for kind, options, root, point in mounts:
        for controller in ("memory", "pids", "cpu"):
            if kind == "cgroup" and controller in options and controller in own:
                path = point / os.path.relpath(own[controller], root)
                if may_make(path):
                    folders[controller] = path
    if {"memory", "pids"} <= folders.keys():
        return Cgroups(1, folders)
    for kind, _, root, point in mounts:
        if kind == "cgroup2" and "" in own:
            path = point / os.path.relpath(own[""], root)
            # A cgroup with processes in it has no children with limits, but the one above it may.
            for above in (path, *path.parents):
                if not (above / "cgroup.subtree_control").exists():
                    break
                there = (above / "cgroup.subtree_control").read_text().split()
                if {"memory", "pids"} <= {*there} and may_make(above):
                    return Cgroups(2, {c: above for c in ("memory", "pids", "cpu") if c in there})
    return None


def may_make(folder: Path) -> bool:
    probe = folder / f"{owner()}-probe"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def started_at(pid: int) -> str | None:
    """When a process started, in ticks since the boot; None: there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def owner() -> str:
    """What the names of this process's cgroups and folders begin with."""
    return f"agentrl-{os.getpid()}-{started_at(os.getpid())}"


def is_abandoned(name: str) -> bool:
    """Whether it is the name of a cgroup or folder whose owner is dead."""
    found = re.fullmatch(r"agentrl-(\d+)-(\d+)-\w+", name)
    return found is not None and started_at(int(found[1])) != found[2]


def own_uids() -> range | None:
    """Uids that nothing else has, where this process may take them."""
    start = (1 << 31) + os.getpid() * NUM_UIDS
    if os.geteuid() != 0:
        return None
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, size = map(int, line.split())
        if first <= start and start + NUM_UIDS <= first + size:
            return range(start, start + NUM_UIDS)
    return None


def find_children() -> dict[int, list[int]]:
    """pid -> pids of its children, of all processes."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{name}/stat").read_text()
                children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(name))
    return children


def kill_trees(roots: list[int]) -> None:
    """Stop them until there are no new ones, lest a fork bomb outruns this; then kill."""
    stopped: set[int] = set()
    for _ in range(100):
        children, found = find_children(), list(roots)
        for pid in found:
            found += children.get(pid, [])
        if stopped.issuperset(found):
            break
        for pid in set(found) - stopped:
            kill(pid, signal.SIGSTOP)
        stopped.update(found)
    for pid in stopped:
        kill(pid)


def num_threads_of(uid: int) -> int:
    """Of all processes of a uid: what RLIMIT_NPROC counts."""
    count = 0
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if path.name.isdigit() and path.stat().st_uid == uid:
                count += len(os.listdir(path / "task"))
    return count


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_uid(uid: int) -> bool:
    """End every process of a uid; whether there was none."""
    pid = os.fork()
    if pid == 0:
        os.setresuid(uid, uid, uid)
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def remove_cgroup(path: Path) -> bool:
    """End what is in it and remove it; False: it takes a little longer."""
    for pid in (path / "cgroup.procs").read_text().split():
        kill(int(pid))
    try:
        path.rmdir()
    except OSError:
        return False
    return True


def remove_folder(path: Path) -> None:
    """Remove a folder of a sandbox, whatever its modes."""

    def open_up(function: Any, name: str, _: Any) -> None:
        os.chmod(os.path.dirname(name), 0o700)
        if not os.path.islink(name):
            os.chmod(name, 0o700)
        function(name)

    shutil.rmtree(path, onerror=open_up)


@dataclass
class Box:
    """One sandbox: what was started for it, and what has to be removed after it."""

    id: int
    slot: int
    pid: int
    uid: int | None
    cgroups: list[Path]
    folder: Path | None
    errors: int  # a file in memory that holds its stderr
    code: int | None = None  # of the process, once it has ended
    oom_kills: int = 0


@dataclass
class Helper:
    control: socket.socket
    cgroups: Cgroups | None = field(default_factory=find_cgroups)
    uids: range | None = field(default_factory=own_uids)
    boxes: dict[int, Box] = field(default_factory=dict)  # by id
    abandoned: list[Path] = field(default_factory=list)  # cgroups of dead owners
    sweep_until: float = field(default_factory=lambda: time.monotonic() + SWEEP_S)

    def run(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        wake, wake_in = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(wake_in, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
        trainer = os.pidfd_open(os.getppid())
        poller = select.poll()
        for fd in (self.control.fileno(), wake, trainer):
            poller.register(fd, select.POLLIN)
        self.sweep()
        self.tell(event="ready", cgroup=self.cgroups and self.cgroups.version, root=bool(self.uids))
        while True:
            self.remove_abandoned()
            ending = self.abandoned or any(box.code is not None for box in self.boxes.values())
            ready = {fd for fd, _ in poller.poll(5 if ending else None)}
            if trainer in ready or (self.control.fileno() in ready and not self.obey()):
                break
            if wake in ready:
                os.read(wake, 4096)
            self.reap()
        self.end()

    def end(self) -> None:
        for box in self.boxes.values():
            self.kill(box)
        last = time.monotonic() + 10
        while self.boxes and time.monotonic() < last:
            self.reap()
            time.sleep(0.002)

    def tell(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            self.control.send(json.dumps(message).encode())

    def obey(self) -> bool:
        """Do what the next packet says; False: there will be none."""
        try:
            data, fds, _, _ = socket.recv_fds(self.control, 1 << 20, 1)
        except ConnectionError:
            return False
        if not data:
            return False
        message = json.loads(data)
        if message["op"] == "kill":
            if message["id"] in self.boxes:
                self.kill(self.boxes[message["id"]])
            return True
        try:
            self.start(message, fds[0])
        except OSError as error:
            self.tell(event="ended", id=message["id"], code=None, oom_kills=0, error=str(error))
        finally:
            os.close(fds[0])
        return True

    def start(self, message: dict[str, Any], stream: int) -> None:
        used = {box.slot for box in self.boxes.values()}
        slot = next(slot for slot in range(len(used) + 1) if slot not in used)
        if slot >= NUM_UIDS:
            raise OSError(f"there are {NUM_UIDS} sandboxes, which is as many as there can be")
        uid = self.uids[slot] if self.uids else None
        name = f"{owner()}-{slot}"
        folder = None
        if message["folder"]:
            folder = Path(os.path.realpath(tempfile.gettempdir()), name)
            folder.mkdir(0o700)
            if uid is not None:
                os.chown(folder, uid, uid)
        cgroups = self.cgroups.make(name, *message["bounds"]) if self.cgroups else []
        errors = os.memfd_create("stderr")
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                signal.set_wakeup_fd(-1)
                for path in cgroups:
                    (path / "cgroup.procs").write_text(str(os.getpid()))
                os.chdir("/")
                for source, fd in ((stream, 0), (stream, 1), (errors, 2)):
                    os.dup2(source, fd)
                os.execve(message["argv"][0], message["argv"], message["env"])
            except BaseException as error:
                os.write(errors, str(error).encode())
            finally:
                os._exit(127)
        box = Box(message["id"], slot, pid, uid, cgroups, folder, errors)
        self.boxes[box.id] = box
        self.tell(
            event="started",
            id=box.id,
            uid=uid,
            folder=folder and str(folder),
            num_threads=num_threads_of(os.getuid()) if folder and not (uid or cgroups) else 0,
        )

    def kill(self, box: Box) -> None:
        """End what is in it; `remove` does the rest."""
        if self.cgroups:
            for pid in (box.cgroups[0] / "cgroup.procs").read_text().split():
                kill(int(pid))
        elif box.code is None:
            kill_trees([box.pid])

    def reap(self) -> None:
        """Collect processes that have ended, and remove the sandboxes that have."""
        boxes = {box.pid: box for box in self.boxes.values() if box.code is None}
        with contextlib.suppress(ChildProcessError):
            while (child := os.waitpid(-1, os.WNOHANG))[0]:
                if child[0] in boxes:
                    box = boxes[child[0]]
                    box.code = os.waitstatus_to_exitcode(child[1])
                    if self.cgroups:
                        box.oom_kills = self.cgroups.num_oom_kills(box.cgroups[0].name)
        for box in list(self.boxes.values()):
            if box.code is not None and self.remove(box):
                del self.boxes[box.id]
                size = os.fstat(box.errors).st_size
                error = os.pread(box.errors, 2000, max(0, size - 2000)).decode(errors="replace")
                os.close(box.errors)
                self.tell(
                    event="ended",
                    id=box.id,
                    code=box.code,
                    oom_kills=box.oom_kills,
                    error=error.strip(),
                )

    def remove(self, box: Box) -> bool:
        """Remove what is left of a sandbox that has ended; False: it takes a little longer."""
        if self.cgroups:
            removed = [remove_cgroup(path) for path in box.cgroups if path.exists()]
            if not all(removed):
                return False
        elif box.folder and box.uid is not None:
            if not kill_uid(box.uid):
                return False
        else:
            known = {other.pid for other in self.boxes.values() if other.code is None}
            strays = [pid for pid in find_children().get(os.getpid(), []) if pid not in known]
            if strays:  # of a worker that ended before what it had started
                kill_trees(strays)
                return False
        if box.folder is not None:
            remove_folder(box.folder)
        return True

    def sweep(self) -> None:
        """Remove what helpers left that are dead; another helper may be at it too."""
        for path in Path(tempfile.gettempdir()).iterdir():
            if is_abandoned(path.name) and os.access(path, os.W_OK) and not path.is_symlink():
                with contextlib.suppress(FileNotFoundError):
                    remove_folder(path)
        for folder in set(self.cgroups.folders.values()) if self.cgroups else ():
            self.abandoned += [path for path in folder.iterdir() if is_abandoned(path.name)]

    def remove_abandoned(self) -> None:
        """Cgroups whose last processes take a moment to end are tried again for a while."""
        left = []
        for path in self.abandoned if time.monotonic() < self.sweep_until else ():
            with contextlib.suppress(FileNotFoundError):
                if not remove_cgroup(path):
                    left.append(path)
        self.abandoned = left


if __name__ == "__main__":
    Helper(socket.socket(fileno=0)).run()
