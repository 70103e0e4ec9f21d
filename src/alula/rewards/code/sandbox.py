"""Runs one Python program with bubblewrap: own namespaces, no network, no files but the interpreter's, hard limits.

bubblewrap isolates; the limits are ours. Address space, CPU time, file size and open files are rlimits, which hold for
one process; the system call filter denies a second one. Every writable file system is a tmpfs of a fixed size. Output
is read from a pipe up to a limit, and a wall clock kills the PID namespace.

bubblewrap ties a program's life to its own only just before it starts it: killed earlier, it would leave a program that
nobody watches. So the program waits at a gate, a socket to this process, and ends if this process is gone.
"""

import fcntl
import json
import math
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from alula.errors import SettingError
from alula.rewards.code.seccomp import seccomp_filter

TMP_BYTES = 16 << 20
OUTPUT_BYTES = 8 << 20
OPEN_FILES = 64
THREADS = 64
POLL = 0.1
"""Seconds between two counts of a program's threads, which no rlimit bounds for root."""

OTHERWISE = "or give the address of a SandboxFusion server as the option url."

# The arguments are the gate and a descriptor to close. `exit` and `quit` come from the module site, whose import takes
# longer than everything else.
SCRIPT = (
    "import builtins as _b, _sitebuiltins as _s, posix as _p, sys as _y;"
    "_g, _c = map(int, _y.argv[1:]); _p.write(_g, b'.'); _p.read(_g, 1) or _p._exit(1); _p.close(_g); _p.close(_c);"
    "_b.exit = _b.quit = _s.Quitter('exit', 'Ctrl-D');"
    "_y.argv[:] = ['/program.py'];"
    "exec(compile(open('/program.py', encoding='utf-8').read(), '/program.py', 'exec'))"
)


class SandboxError(RuntimeError):
    """The sandbox failed, not the program in it."""


@dataclass(frozen=True)
class Limits:
    seconds: float
    """CPU time of one run."""
    memory: int
    """Address space in bytes."""

    @property
    def wall_seconds(self) -> float:
        """A machine under load runs a program more slowly than its CPU time says."""
        return 3 * self.seconds + 1


@dataclass(frozen=True)
class Run:
    output: bytes
    """What the program wrote to standard output."""
    ended: str
    """`exit code <n>`, `signal <n>`, `time`, `output` or `threads`: the limit that it exceeded."""
    seconds: float = 0.0
    """CPU time."""

    @property
    def succeeded(self) -> bool:
        return self.ended == "exit code 0"


class Bubblewrap:
    """Runs programs one at a time. Building one runs a first program, and raises where that does not work."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.filter = seccomp_filter()
        found = shutil.which("bwrap")
        if found is None:
            raise SettingError(
                "reward code: no sandbox: bubblewrap is not installed. Install it (apt-get install bubblewrap), "
                + OTHERWISE
            )
        self.command = [*limited(limits), found, *namespaces(), *file_system()]
        try:
            run = self.run("print(6 * 7)")
            problem = "" if run.output == b"42\n" else f"a test program ended with {run.ended}"
        except SandboxError as error:
            problem = str(error)
        if problem:
            raise SettingError(
                f"reward code: bubblewrap cannot run a program here ({problem}). It needs version 0.7 or later and "
                "user namespaces, which containers and some distributions block: start Docker with --security-opt "
                "seccomp=unconfined --security-opt apparmor=unconfined, or set sysctl "
                f"kernel.apparmor_restrict_unprivileged_userns=0, {OTHERWISE}"
            )

    def run(self, program: str, stdin: str = "", wall_seconds: float | None = None) -> Run:
        """Run the program as a script. Raises `SandboxError` if it could not be started."""
        with ExitStack() as stack:
            texts = (program.encode(errors="replace"), self.filter, stdin.encode(errors="replace"))
            code, rules, given = [stack.enter_context(sealed(text)) for text in texts]
            status_reader, status = os.pipe()
            stack.callback(os.close, status_reader)
            gate, inner_gate = map(stack.enter_context, socket.socketpair())
            arguments = ["--ro-bind-data", str(code), "/program.py", "--remount-ro", "/"]
            arguments += ["--seccomp", str(rules), "--json-status-fd", str(status)]
            # bubblewrap holds the reader too: if this process is gone and a write fails, it leaves a blocked child
            descriptors = [inner_gate.fileno(), status_reader]
            process = subprocess.Popen(
                [*self.command, *arguments, *interpreter(), "-c", SCRIPT, *map(str, descriptors)],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[code, rules, status, *descriptors],
                process_group=0,  # who kills this process with its group must not kill bubblewrap before the program
            )
            os.close(status)
            inner_gate.close()
            return Watch(process, status_reader, gate).until_end(wall_seconds or self.limits.wall_seconds)


class Watch:
    """Lets the program through its gate and reads its output until it ends or exceeds a limit."""

    def __init__(self, process: subprocess.Popen[bytes], status: int, gate: socket.socket) -> None:
        self.process, self.status, self.gate = process, status, gate
        self.program: int | None = None
        """Process id of the program, once bubblewrap has reported it."""
        self.read = {"out": bytearray(), "error": bytearray(), "status": bytearray(), "gate": bytearray()}

    def until_end(self, wall_seconds: float) -> Run:
        out, error = self.process.stdout, self.process.stderr
        assert out is not None
        assert error is not None
        exceeded: str | None = "interrupted"
        with out, error, selectors.DefaultSelector() as selector:
            descriptors = (out.fileno(), error.fileno(), self.status, self.gate.fileno())
            for descriptor, name in zip(descriptors, self.read):
                selector.register(descriptor, selectors.EVENT_READ, name)
            try:
                exceeded = self._read(selector, time.monotonic() + wall_seconds)
            finally:
                if exceeded:
                    self._kill()
                _, status, usage = os.wait4(self.process.pid, 0)
                self.process.returncode = os.waitstatus_to_exitcode(status)
        ended = exceeded or self._exit()
        return Run(bytes(self.read["out"]), ended, usage.ru_utime + usage.ru_stime)

    def _read(self, selector: selectors.BaseSelector, deadline: float) -> str | None:
        """Read all streams to their ends; the name of the limit that the program exceeded, if any."""
        room, next_count = OUTPUT_BYTES, time.monotonic() + POLL
        while selector.get_map():
            now = time.monotonic()
            if now >= deadline:
                return "time"
            if now >= next_count:
                next_count = now + POLL
                if self._threads() > THREADS:
                    return "threads"
            for key, _ in selector.select(min(deadline, next_count) - now):
                part = os.read(key.fd, 1 << 16)
                if not part:
                    selector.unregister(key.fd)
                room -= len(part)
                if room < 0:
                    return "output"
                self.read[key.data] += part
            if self.program is None:
                self.program = self._status("child-pid")
            if self.program is not None and self.read["gate"]:
                self.read["gate"].clear()
                with suppress(BrokenPipeError):  # it was killed
                    self.gate.send(b".")
        return None

    def _status(self, key: str) -> int | None:
        """A number that bubblewrap reported in one of its lines of JSON."""
        documents = (json.loads(line) for line in self.read["status"].splitlines(keepends=True) if line.endswith(b"\n"))
        return next((document[key] for document in documents if key in document), None)

    def _threads(self) -> int:
        try:
            return len(os.listdir(f"/proc/{self.program}/task"))
        except OSError:
            return 0

    def _kill(self) -> None:
        """Kill the program, process 1 of its namespace: all others die with it, and bubblewrap reports what it used. A
        program without an id has not passed its gate, and ends there."""
        if self.program is None:
            self.gate.close()
            return
        with suppress(ProcessLookupError):
            os.kill(self.program, signal.SIGKILL)

    def _exit(self) -> str:
        """How the program ended. bubblewrap reports an exit code only if it could start the program."""
        code = self._status("exit-code")
        if code is None:
            raise SandboxError(self.read["error"].decode(errors="replace").strip()[:300] or "no status")
        return f"signal {code - 128}" if code > 128 else f"exit code {code}"


def limited(limits: Limits) -> list[str]:
    """A command that sets the rlimits, soft and hard, and runs what follows. A shell does it: code between fork and
    exec is unsafe in a process with threads."""
    blocks = TMP_BYTES // 512
    settings = (
        f"ulimit -v {limits.memory >> 10}; ulimit -t {math.ceil(limits.seconds)}; ulimit -f {blocks}; "
        f"ulimit -n {OPEN_FILES}; ulimit -c 0"
    )
    return ["sh", "-c", f'set -e; {settings}; exec "$@"', "sh"]


def namespaces() -> list[str]:
    nobody = "65534"
    return [
        *("--unshare-user", "--unshare-all", "--uid", nobody, "--gid", nobody, "--hostname", "sandbox"),
        *("--cap-drop", "ALL", "--new-session", "--die-with-parent", "--as-pid-1"),
        *("--clearenv", "--setenv", "PYTHONHASHSEED", "0"),  # the order of a set must not change a reward
        *("--setenv", "MALLOC_ARENA_MAX", "1"),  # every thread would reserve 64 MiB of address space
    ]


def file_system() -> list[str]:
    """The interpreter and system libraries, four devices and a small /tmp. /proc is not there."""
    arguments: list[str] = []
    for folder in ("/lib", "/lib64", "/usr/lib", "/usr/lib64"):
        if os.path.islink(folder):
            arguments += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            arguments += ["--ro-bind", folder, folder]
    for path in ("/etc/ld.so.cache", f"{sys.base_prefix}/lib", interpreter()[0]):
        if os.path.exists(path) and path not in arguments:
            arguments += ["--ro-bind", path, path]
    for device in ("null", "zero", "random", "urandom"):
        arguments += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    return [*arguments, "--size", str(TMP_BYTES), "--tmpfs", "/tmp", "--chdir", "/tmp"]


def interpreter() -> list[str]:
    """Python without site-packages: -S, and no folder of the script on the path."""
    return [os.path.realpath(sys.executable), "-s", "-S", "-B", "-P", "-X", "utf8"]


@contextmanager
def sealed(content: bytes) -> Iterator[int]:
    """A file in memory that its readers cannot change."""
    file = os.memfd_create("alula", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(file, "wb", closefd=False) as writer:
            writer.write(content)
        os.lseek(file, 0, os.SEEK_SET)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        yield file
    finally:
        os.close(file)
