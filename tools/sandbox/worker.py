"""What lives in every sandbox: it runs commands, Python and file operations, one at a time.

Requests come as JSON lines on stdin, answers go as JSON lines to stdout. The sandbox's own
interpreter gets it as source, so it uses no more than the standard library of Python 3.9. As pid 1
it cannot be killed from inside, and nothing outlives it; it is not dumpable, so that code of the
same uid can neither read nor trace it.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import signal
import stat
import time
import traceback

FLOOD = 64 << 20  # bytes of output that stop what writes them
FLOODED = b"Stopped after %d MiB of output.\n" % (FLOOD >> 20)
INTERRUPT_S = 1.0  # that an interrupted interpreter has to end what it does
CHUNK = 1 << 16
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36

prctl = ctypes.CDLL(None).prctl


class Output:
    """The head and the tail of a stream, at most `keep` bytes together."""

    def __init__(self, keep):
        self.keep_head, self.keep_tail = keep // 2, keep - keep // 2
        self.head, self.tail, self.total, self.closed = bytearray(), bytearray(), 0, False
        self.limit = FLOOD

    def add(self, data):
        self.total += len(data)
        room = self.keep_head - len(self.head)
        self.head += data[:room]
        self.tail += data[room:]
        if len(self.tail) > self.keep_tail + (1 << 20):
            del self.tail[: -self.keep_tail]

    def encoded(self):
        tail = self.tail[-self.keep_tail :]
        dropped = self.total - len(self.head) - len(tail)
        return [base64.b64encode(self.head).decode(), dropped, base64.b64encode(tail).decode()]


class Outcome:
    """What the interpreter says of one cell, by a pipe that the cell may write to as well."""

    def __init__(self, id):
        self.id, self.code, self.error = id, None, b""
        self.line, self.total, self.limit, self.closed = bytearray(), 0, 1 << 20, False

    def add(self, data):
        self.total += len(data)
        *lines, self.line = (self.line + data).split(b"\n")
        for line in lines:
            try:
                id, code, error = json.loads(line)
                if id == self.id:  # else of an earlier cell, for which another answer was forged
                    self.code, self.error = int(code), str(error).encode(errors="replace")
            except (ValueError, TypeError, RecursionError):
                self.closed = True


class Feed:
    """What goes into a pipe, as fast as its reader takes it."""

    def __init__(self, fd, data=b"", more=False):
        self.fd: int | None = fd
        self.pending, self.more = bytearray(data), more
        os.set_blocking(fd, False)

    def push(self):
        try:
            if self.fd is not None:
                del self.pending[: os.write(self.fd, self.pending[: 1 << 20])]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.close()

    def close(self):
        self.pending.clear()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class Interpreter:
    """The worker's ends of the pipes of the persistent interpreter."""

    def __init__(self, pid, code, control, output):
        self.pid, self.code, self.control, self.output = pid, code, control, output

    def close(self):
        for fd in (self.code, self.control, self.output):
            os.close(fd)


class Worker:
    def __init__(self):
        self.buffer = bytearray()
        self.interpreter: Interpreter | None = None
        self.awaited = set()  # pids whose exit codes somebody asks for
        self.ended = {}  # pid -> exit code
        self.background = {}  # fd -> None: output of what outlived its command, thrown away
        self.wake, wake_in = os.pipe()
        for fd in (self.wake, wake_in):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if os.getpid() != 1:  # which gets, from inside, only those signals that it handles
            signal.signal(signal.SIGTERM, lambda *_: self.die())
        start = self.read_request()
        self.home, self.keep, self.limits = start["home"], start["keep"], start["limits"]
        os.environ.update(start["env"])
        self.notebook = compile(start["notebook"], "notebook", "exec")
        uid = start["uid"]
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        # kill(-1) reaches every process that it may, so only where all of those are this sandbox's.
        self.owns_all = os.getpid() == 1 or uid is not None
        prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        if os.getpid() != 1:
            prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        os.chdir(self.home)
        self.answer(start["id"])

    def serve(self):
        while True:
            request = self.read_request()
            if "op" in request:  # else input of a command that has ended
                self.answer(request["id"], **getattr(self, request["op"])(request))

    def leave(self):
        self.kill_all()
        os._exit(0)

    def die(self):
        self.kill_all()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def answer(self, id, **reply):
        line = memoryview(json.dumps({"id": id, **reply}).encode() + b"\n")
        while line:
            line = line[os.write(1, line) :]

    # Operations

    def exec(self, request):
        cmd = request["cmd"]
        if isinstance(cmd, str):
            cmd = ["/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh", "-c", cmd]

        def main():
            try:
                os.chdir(os.path.join(self.home, request["cwd"]))
                os.execvpe(cmd[0], cmd, {**os.environ, **request["env"]})
            except (OSError, ValueError) as error:
                os.write(2, f"{cmd[0]}: {error}\n".encode(errors="replace"))
                os._exit(126 if isinstance(error, PermissionError) else 127)

        return self.run(main, request)

    def read(self, request):
        def main():
            fd = self.open(request["path"], os.O_RDONLY)
            os.lseek(fd, request["offset"], os.SEEK_SET)
            left = request["size"]
            while left and (data := os.read(fd, min(left, CHUNK))):
                left -= len(data)
                write_all(1, data)

        return self.run(main, request, keep=2 * request["size"])

    def write(self, request):
        def main():
            os.makedirs(os.path.dirname(self.inside(request["path"])), exist_ok=True)
            fd = self.open(request["path"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            while data := os.read(0, CHUNK):
                write_all(fd, data)

        return self.run(main, request)

    def run(self, main, request, keep=None):
        """Run `main` in a child of its own, to its end or the deadline."""
        deadline = time.monotonic() + request["timeout"]
        (stdin, to), (out, stdout), (err, stderr) = os.pipe(), os.pipe(), os.pipe()
        pid, lost = self.fork(main, stdin, stdout, stderr)
        for fd in (stdin, stdout, stderr):
            os.close(fd)
        feed = Feed(to, more=request.get("input", False))
        sinks = {fd: Output(keep or self.keep) for fd in (out, err)}
        on_time = self.wait(request["id"], sinks, lambda: pid in self.ended, deadline, feed)
        timed_out = not on_time and time.monotonic() >= deadline
        if not on_time:
            lost = lost or self.interpreter is not None
            self.kill_all()
        self.drain(sinks)
        if not on_time and not timed_out:
            sinks[err].add(FLOODED)
        feed.close()
        for fd, sink in sinks.items():
            if sink.closed or not on_time or len(self.background) >= 64:
                os.close(fd)
            else:
                self.background[fd] = None
        return {
            "code": self.ended.pop(pid),
            "out": sinks[out].encoded(),
            "err": sinks[err].encoded(),
            "timed_out": timed_out,
            "lost": lost,
        }

    def python(self, request):
        """Run code in the interpreter; a deadline interrupts it, and kills what does not heed."""
        deadline = time.monotonic() + request["timeout"]
        lost = self.interpreter is not None and self.interpreter.pid in self.ended
        if lost:
            self.end_interpreter()
        if self.interpreter is None:
            self.interpreter, full = self.start_interpreter()
            lost = lost or full
        it = self.interpreter
        feed = Feed(os.dup(it.code), json.dumps([request["id"], request["code"]]).encode() + b"\n")
        output, outcome = Output(self.keep), Outcome(request["id"])
        sinks = {it.output: output, it.control: outcome}

        def done():
            return outcome.code is not None or outcome.closed or it.pid in self.ended

        on_time = self.wait(request["id"], sinks, done, deadline, feed)
        timed_out = not on_time and time.monotonic() >= deadline
        if not on_time:
            signal_group(it.pid, signal.SIGINT)
            output.limit = 1 << 60
            self.wait(request["id"], sinks, done, time.monotonic() + INTERRUPT_S, feed)
        feed.close()
        self.drain({it.output: output})
        code = outcome.code
        if code is None:
            if done():  # give a process that ends the time to say how
                last = time.monotonic() + 0.2
                self.wait(request["id"], {}, lambda: it.pid in self.ended, last)
            if it.pid in self.ended:
                code = self.end_interpreter()
            else:
                code = -signal.SIGKILL
                self.kill_all()
            lost = True
        text = Output(self.keep)
        text.add(outcome.error)
        if not on_time and not timed_out:
            text.add(FLOODED)
        return {
            "code": code,
            "out": output.encoded(),
            "err": text.encoded(),
            "timed_out": timed_out,
            "lost": lost,
        }

    def start_interpreter(self):
        """A new one, and whether everything had to be killed for it."""
        (code, to), (control, answer), (out, stdout) = os.pipe(), os.pipe(), os.pipe()
        null = os.open(os.devnull, os.O_RDONLY)

        def main():
            namespace: dict = {"__name__": "notebook"}
            exec(self.notebook, namespace)
            namespace["interpret"](code, answer, self.home)

        pid, lost = self.fork(main, null, stdout, stdout, keep=(code, answer))
        for fd in (code, answer, stdout, null):
            os.close(fd)
        for fd in (control, out):
            os.set_blocking(fd, False)
        return Interpreter(pid, to, control, out), lost

    def end_interpreter(self):
        """Returns the exit code of an interpreter that has ended."""
        it, self.interpreter = self.interpreter, None
        assert it is not None
        it.close()
        return self.ended.pop(it.pid)

    # Files

    def inside(self, path):
        full = os.path.realpath(os.path.join(self.home, path))
        if os.path.commonpath([self.home, full]) != self.home:
            raise PermissionError(errno.EACCES, "it is outside of the work folder")
        return full

    def open(self, path, flags):
        fd = os.open(self.inside(path), flags | os.O_NONBLOCK, 0o644)
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return fd

    # Processes

    def fork(self, main, stdin, stdout, stderr, keep=()):
        """Run `main` in a child; returns its pid, and whether the interpreter went to make room."""
        lost = False
        try:
            pid = os.fork()
        except OSError:  # the sandbox is full of processes, or of memory
            lost = self.interpreter is not None
            self.kill_all()
            pid = os.fork()
        if pid == 0:
            be_child(main, (stdin, stdout, stderr), keep, self.limits)
        self.awaited.add(pid)
        return pid, lost

    def reap(self):
        with contextlib.suppress(ChildProcessError):
            while (child := os.waitpid(-1, os.WNOHANG))[0]:
                self.collect(*child)

    def collect(self, pid, status):
        if pid in self.awaited:
            self.awaited.discard(pid)
            self.ended[pid] = os.waitstatus_to_exitcode(status)

    def kill_all(self):
        """End every other process of the sandbox."""
        with contextlib.suppress(ChildProcessError):
            while True:
                if self.owns_all:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(-1, signal.SIGKILL)
                else:
                    kill_descendants(os.getpid())
                pid, status = os.waitpid(-1, os.WNOHANG)
                self.collect(pid, status)
                if pid == 0:
                    time.sleep(0.001)
        if self.interpreter is not None:
            self.end_interpreter()
        for fd in self.background:
            os.close(fd)
        self.background.clear()

    # Streams

    def read_request(self):
        while b"\n" not in self.buffer:
            self.pump({}, None, listen=True)
        line, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(line)

    def wait(self, id, sinks, done, deadline, feed: Feed | None = None):
        """Move data until `done()`; False at the deadline or when there is too much of it."""
        for fd in sinks:
            os.set_blocking(fd, False)
        while not done():
            left = deadline - time.monotonic()
            if left <= 0 or any(sink.total > sink.limit for sink in sinks.values()):
                return False
            if feed is not None:
                self.take_input(id, feed)
            listen = feed is not None and feed.more and len(feed.pending) < 1 << 20
            self.pump(sinks, left, feed, listen)
        return True

    def take_input(self, id, feed):
        """Hand on the input of request `id` that has come."""
        while feed.more and b"\n" in self.buffer:
            line, _, self.buffer = self.buffer.partition(b"\n")
            message = json.loads(line)
            if message["id"] == id:
                data = base64.b64decode(message["input"])
                feed.more = bool(data)
                if feed.fd is not None:
                    feed.pending += data
        if not feed.pending and not feed.more:
            feed.close()

    def pump(self, sinks, timeout, feed: Feed | None = None, listen=False):
        """Wait until something can be moved, or a child ends, and move it."""
        poller = select.poll()
        poller.register(0, select.POLLIN if listen else 0)
        poller.register(self.wake, select.POLLIN)
        for fd in self.background:
            poller.register(fd, select.POLLIN)
        for fd, sink in sinks.items():
            if not sink.closed:
                poller.register(fd, select.POLLIN)
        feed_fd = feed.fd if feed is not None and feed.pending else None
        if feed_fd is not None:
            poller.register(feed_fd, select.POLLOUT)
        for fd, event in poller.poll(None if timeout is None else timeout * 1000 + 1):
            if fd == 0:
                data = os.read(0, CHUNK) if listen else b""
                if not data:  # nobody is left to work for
                    self.leave()
                self.buffer += data
            elif fd == self.wake:
                os.read(self.wake, CHUNK)
            elif feed is not None and fd == feed_fd:
                feed.push()
            elif fd in sinks:
                self.take(fd, sinks[fd])
            elif event and not os.read(fd, CHUNK):
                os.close(fd)
                del self.background[fd]
        self.reap()

    def take(self, fd, sink):
        """Read once; returns whether there may be more."""
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        sink.closed = not data
        sink.add(data)
        return bool(data)

    def drain(self, sinks):
        """Take what is in the pipes, but no more than a pipe holds."""
        for fd, sink in sinks.items():
            end = sink.total + (1 << 20)
            while sink.total < end and not sink.closed and self.take(fd, sink):
                pass


def be_child(main, streams, keep, limits):
    """Be the child of a fork to the end."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
        for fd in set(range(3, 512)) - set(keep):
            with contextlib.suppress(OSError):
                os.close(fd)
        # Only now, without the worker's streams, may others of this uid look into it.
        prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        for name, value in limits.items():
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
        main()
        code = 0
    except OSError as error:
        write_all(2, json.dumps([error.errno, error.strerror]).encode())
    except BaseException:
        write_all(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(code)


def write_all(fd, data):
    while data:
        data = data[os.write(fd, data) :]


def signal_group(pid, number):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def kill_descendants(pid):
    """Stop them until there are no new ones, lest a fork bomb outruns this; then kill."""
    stopped = set()
    for _ in range(100):
        new = find_descendants(pid) - stopped
        if not new:
            break
        for child in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGSTOP)
        stopped |= new
    for child in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def find_descendants(pid):
    children = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return set(found[1:])


if __name__ == "__main__":
    Worker().serve()
