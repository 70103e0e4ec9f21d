"""Hostile programs: what each kind does, how the host knows that it was stopped, and a benign twin."""

import os
import platform
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from alula.rewards.code.sandbox import OPEN_FILES, OUTPUT_BYTES, THREADS, TMP_BYTES, Bubblewrap, Run

MEMORY = 256 << 20
SECRET = "secret-4f1d9c"
LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"


def caught(*statements: str) -> str:
    """A program that prints how each statement fails, or what it evaluates to."""
    return "".join(
        f"try: print('did', {statement})\nexcept BaseException as error: print(type(error).__name__, error)\n"
        for statement in statements
    )


def denied(call: str) -> str:
    """A program that prints the errno of a call of libc."""
    return f"{LIBC}ctypes.set_errno(0)\nprint({call}, ctypes.get_errno())\n"


@dataclass(frozen=True)
class Evidence:
    run: Run
    wall: float
    processes: int
    """Most at one time: bubblewrap and what it started."""
    peak_bytes: int
    left: int
    """Processes that still ran afterwards."""

    @property
    def text(self) -> str:
        return self.run.output.decode(errors="replace")


@dataclass(frozen=True)
class Kind:
    hostile: str
    benign: str
    """Must print `fine`."""
    holds: Callable[[Evidence], bool]
    """Whether the mechanism stopped it."""
    wall: float | None = None


def only_the_program(e: Evidence) -> bool:
    """bubblewrap and one program, at any time."""
    return e.processes <= 2


def no_second_process(e: Evidence) -> bool:
    return "PermissionError" in e.text and "did" not in e.text and only_the_program(e)


def out_of_memory(e: Evidence) -> bool:
    return "MemoryError" in e.text and e.peak_bytes <= MEMORY


def filled_memory(e: Evidence) -> bool:
    return e.peak_bytes >= MEMORY / 2 and out_of_memory(e)


def out_of_cpu(e: Evidence) -> bool:
    """The kernel counts the limit in ticks and reports what was used more finely: under load they differ by a third."""
    return e.run.ended == f"signal {signal.SIGKILL.value}" and 0.5 <= e.run.seconds <= 2


def cut_off(e: Evidence) -> bool:
    return e.run.ended == "output" and len(e.run.output) <= OUTPUT_BYTES


def failed(*words: str) -> Callable[[Evidence], bool]:
    return lambda e: all(word in e.text for word in words) and "did" not in e.text


def errno(number: int) -> Callable[[Evidence], bool]:
    return lambda e: e.text.split()[-2:] == ["-1", str(number)]


EPERM, ENOSYS = 1, 38
CLONE, CLONE3, URING = {"x86_64": (56, 435, 425), "aarch64": (220, 435, 425)}[platform.machine()]

KINDS = {
    # -- processes and threads
    "fork bomb": Kind(
        "import os\nfor _ in range(1000):\n"
        "  try: os.fork(); print('did')\n  except OSError as error: last = type(error).__name__\nprint(last)",
        "import os; print('fine' if os.getpid() == 1 else '')",
        no_second_process,
    ),
    "subprocess": Kind(
        "import subprocess, sys\n" + caught("subprocess.Popen([sys.executable, '-c', 'while 1: pass'])"),
        "import subprocess; print(subprocess.list2cmdline(['fine']))",
        no_second_process,
    ),
    "posix_spawn": Kind(
        "import os, sys\n" + caught("os.posix_spawn(sys.executable, ['python'], {})"),
        "import os; print('fine' if os.sep else '')",
        no_second_process,
    ),
    "shell": Kind(
        "import os\nprint('code', os.system('echo did'))",
        "import shlex; print(shlex.join(['fine']))",
        lambda e: "code 0" not in e.text and "did" not in e.text and only_the_program(e),
    ),
    "multiprocessing": Kind(
        "import multiprocessing as m\n" + caught("m.get_context('fork').Process(target=print).start()"),
        "from concurrent.futures import ThreadPoolExecutor as P\nwith P(2) as p: print(*p.map(str, ['fine']))",
        no_second_process,
    ),
    "clone by number": Kind(
        denied(f"libc.syscall({CLONE}, 17, 0, 0, 0, 0)"),
        LIBC + "print('fine' if libc.getpid() == 1 else '')",
        errno(EPERM),
    ),
    "clone3 by number": Kind(
        denied(f"libc.syscall({CLONE3}, 0, 0)"),
        "import threading\nt = threading.Thread(target=print, args=('fine',)); t.start(); t.join()",
        errno(ENOSYS),
    ),
    "daemon": Kind(
        "import os, signal, time\n"
        "for s in range(1, 65):\n  try: signal.signal(s, signal.SIG_IGN)\n  except (OSError, ValueError): pass\n"
        "try: os.setsid()\nexcept OSError: pass\nos.close(0); os.close(1); os.close(2); time.sleep(600)",
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN); print('fine')",
        lambda e: e.run.ended == "time" and e.left == 0,
        wall=0.5,
    ),
    "thread bomb": Kind(
        "import threading, time\nthreading.stack_size(32768)\nstarted = 0\nwhile True:\n"
        "  threading.Thread(target=time.sleep, args=(600,)).start(); started += 1; print(started, flush=True)\n"
        f"  if started == {THREADS - 1}: time.sleep(0.3)",  # so many are allowed, and read before there is one too many
        "import threading, time\nthreads = [threading.Thread(target=time.sleep, args=(0.2,)) for _ in range(10)]\n"
        "for t in threads: t.start()\nfor t in threads: t.join()\nprint('fine')",
        # its own count, since it may be ended before the watch looks again: the last thread may not be printed yet
        lambda e: e.run.ended == "threads" and int(e.text.split()[-1]) >= THREADS - 1 and e.wall < 3 and e.left == 0,
    ),
    # -- memory and files
    "one large object": Kind(caught("len(bytes(1 << 33))"), "x = bytes(50 << 20); print('fine')", out_of_memory),
    "growing list": Kind(
        "import time\nkept = []\ntry:\n  while True: kept.append(bytearray(b'x' * (1 << 20)))\n"
        "except MemoryError: time.sleep(0.1); del kept; print('MemoryError')",
        "kept = [bytearray(1 << 20) for _ in range(50)]; print('fine')",
        filled_memory,
    ),
    "mmap": Kind(
        "import mmap, time\nkept = []\ntry:\n  while True:\n    kept.append(mmap.mmap(-1, 8 << 20)); "
        "kept[-1].write(b'x' * (8 << 20))\nexcept (OSError, MemoryError): time.sleep(0.1); print('MemoryError')",
        "import mmap; m = mmap.mmap(-1, 1 << 20); m[:4] = b'fine'; print(m[:4].decode())",
        filled_memory,
    ),
    "threads that allocate": Kind(
        "import threading\ndef grow():\n  kept = []\n  try:\n    while True: kept.append(bytearray(1 << 20))\n"
        "  except MemoryError: print('MemoryError')\n"
        "threads = [threading.Thread(target=grow) for _ in range(4)]\nfor t in threads: t.start()\n"
        "for t in threads: t.join()",
        "import threading\nt = threading.Thread(target=bytearray, args=(1 << 20,)); t.start(); t.join(); print('fine')",
        out_of_memory,
    ),
    "memory file": Kind(
        "import os\n" + caught("os.memfd_create('x')"),
        "import io; print(io.StringIO('fine').read())",
        failed("PermissionError"),
    ),
    "shared memory": Kind(
        denied("libc.shmget(0, ctypes.c_size_t(1 << 33), 0o1777)"), "print(bytes(b'fine').decode())", errno(EPERM)
    ),
    "full disk": Kind(
        "total = 0\ntry:\n  for i in range(64):\n    with open(f'/tmp/{i}', 'wb', buffering=0) as f:\n"
        "      for _ in range(16): total += f.write(bytes(1 << 20))\n"
        "except OSError as error: print(error.errno, total)",
        "open('/tmp/x', 'w').write('fine'); print(open('/tmp/x').read())",
        lambda e: e.text.split()[0] == "28" and 0 < int(e.text.split()[1]) <= TMP_BYTES,
    ),
    "huge sparse file": Kind(
        "import os\n" + caught("os.truncate(os.open('/tmp/x', os.O_CREAT | os.O_RDWR), 1 << 40)"),
        "import os\nf = os.open('/tmp/x', os.O_CREAT | os.O_RDWR); os.truncate(f, 1 << 20); print('fine')",
        failed("OSError", "File too large"),
    ),
    "open files": Kind(
        "kept = []\ntry:\n  while True: kept.append(open('/dev/null'))\nexcept OSError as error: count = len(kept); "
        "del kept; print(error.errno, count)",
        "kept = [open('/dev/null') for _ in range(30)]; print('fine')",
        lambda e: e.text.split()[0] == "24" and int(e.text.split()[1]) < OPEN_FILES,
    ),
    "core dump": Kind(
        "import ctypes; ctypes.string_at(0)",
        "import ctypes; print(ctypes.string_at(b'fine').decode())",
        lambda e: e.run.ended == f"signal {signal.SIGSEGV.value}" and not list(Path.cwd().glob("core*")),
    ),
    "endless recursion": Kind(
        "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n  def __repr__(self): return repr(self)\nrepr(A())",
        "import sys\nsys.setrecursionlimit(20000)\ndef f(n): return n and f(n - 1)\nf(10000); print('fine')",
        lambda e: e.run.ended != "exit code 0" and e.peak_bytes <= MEMORY,
    ),
    # -- time
    "endless loop": Kind("while True: pass", "for _ in range(10**5): pass\nprint('fine')", out_of_cpu, wall=20),
    "large power": Kind("9 ** 9 ** 9", "print('fine' if 9 ** 9 ** 2 > 0 else '')", out_of_cpu, wall=20),
    "regular expression": Kind(
        "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')",
        "import re; print(re.match('f.*', 'fine')[0])",
        out_of_cpu,
        wall=20,
    ),
    "ignored signals": Kind(
        "import signal\nfor s in (signal.SIGXCPU, signal.SIGTERM, signal.SIGINT): signal.signal(s, signal.SIG_IGN)\n"
        "while True: pass",
        "import signal\nsignal.signal(signal.SIGALRM, lambda *_: print('fine')); signal.raise_signal(signal.SIGALRM)",
        out_of_cpu,
        wall=20,
    ),
    "busy threads": Kind(
        "import threading, hashlib\ndef burn():\n  while True: hashlib.sha256(bytes(1 << 20))\n"
        "for _ in range(8): threading.Thread(target=burn).start()",
        "import hashlib; hashlib.sha256(bytes(1 << 20)); print('fine')",
        out_of_cpu,
        wall=20,
    ),
    "sleep": Kind(
        "import time; time.sleep(600)",
        "import time; time.sleep(0.05); print('fine')",
        lambda e: e.run.ended == "time" and e.wall < 5 and e.run.seconds < 0.4,
        wall=0.5,
    ),
    "right words, then sleep": Kind(
        "import time; print('fine', flush=True); time.sleep(600)",
        "print('fine', flush=True)",
        lambda e: e.text == "fine\n" and e.run.ended == "time",
        wall=2,
    ),
    # -- output
    "endless output": Kind("while True: print('x' * 10000)", "print('fine' + ' ' * 100000)", cut_off),
    "endless errors": Kind(
        "import sys\nwhile True: print('x' * 10000, file=sys.stderr)",
        "import sys; print('no', file=sys.stderr); print('fine')",
        lambda e: e.run.ended == "output" and e.run.output == b"",
    ),
    # -- network
    "TCP": Kind(
        "import socket\n" + caught("socket.create_connection(('127.0.0.1', PORT), 1)"),
        "import socket\na, b = socket.socketpair(); a.send(b'fine'); print(b.recv(4).decode())",
        failed("PermissionError"),
    ),
    "UDP": Kind(
        "import socket\n"
        + caught("socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))"),
        "import socket; print('fine' if socket.htons(1) else '')",
        failed("PermissionError"),
    ),
    "IPv6": Kind(
        "import socket\n" + caught("socket.socket(socket.AF_INET6).connect(('::1', PORT))"),
        "import socket; print('fine' if socket.AF_INET6 else '')",
        failed("PermissionError"),
    ),
    "netlink": Kind(
        "import socket\n" + caught("socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)"),
        "import socket; print('fine' if socket.inet_aton('1.2.3.4') else '')",
        failed("PermissionError"),
    ),
    "abstract unix socket": Kind(
        "import socket\n" + caught("socket.socket(socket.AF_UNIX).connect('\\0alula-hostile-PORT')"),
        "import asyncio\nasync def f(): return 'fine'\nprint(asyncio.run(f()))",
        failed("ConnectionRefusedError"),
    ),
    # -- the host's files
    "read a file": Kind(
        caught("open('FOLDER/canary').read()", "open('/etc/passwd').read()", "open('/proc/1/environ').read()"),
        "open('canary', 'w').write('fine'); print(open('/tmp/canary').read())",
        failed("FileNotFoundError"),
    ),
    "list the home": Kind(
        "import os\nprint(*os.listdir('/home') if os.path.exists('/home') else '', *os.listdir('HOME'))",
        "import os; print('fine' if os.listdir('/tmp') == [] else '')",
        lambda e: set(e.text.split()) <= set(Path(sys.base_prefix).parts),
    ),
    "list the repository": Kind(
        "import os\n" + caught("os.listdir('REPOSITORY')", "os.listdir('/proc')"),
        "import os; print('fine' if 'tmp' in os.listdir('/') else '')",
        failed("FileNotFoundError"),
    ),
    "write a file": Kind(
        caught(
            "open('FOLDER/canary', 'w').write('x')", "open('/x', 'w')", "open('/dev/x', 'w')", "open('/dev/shm/x', 'w')"
        ),
        "open('/tmp/x', 'w').write('x'); print('fine')",
        lambda e: e.text.count("Error") == 4 and "did" not in e.text,
    ),
    "change the interpreter": Kind(
        "import os\n"
        + caught("open(os.__file__, 'a').write('#')", "os.remove(os.__file__)", "os.chmod(os.__file__, 0o777)"),
        "import os; print('fine' if open(os.__file__).readline() else '')",
        lambda e: e.text.count("Read-only file system") == 3,
    ),
    "symlink": Kind(
        "import os\nos.symlink('FOLDER/canary', '/tmp/link')\n"
        + caught("open('/tmp/link').read()", "open('/tmp/../FOLDER/canary')"),
        "import os\nopen('/tmp/a', 'w').write('fine'); os.symlink('/tmp/a', '/tmp/b'); print(open('/tmp/b').read())",
        failed("FileNotFoundError"),
    ),
    "hard link": Kind(
        "import os\n" + caught("os.link('/program.py', '/tmp/x')", "os.link(os.__file__, '/tmp/x')"),
        "import os\nopen('/tmp/a', 'w').write('fine'); os.link('/tmp/a', '/tmp/b'); print(open('/tmp/b').read())",
        lambda e: e.text.count("OSError") == 2,
    ),
    "environment": Kind(
        "import os; print(dict(os.environ))",
        "import os; os.environ['X'] = 'fine'; print(os.environ['X'])",
        lambda e: set(eval(e.text)) <= {"PYTHONHASHSEED", "MALLOC_ARENA_MAX", "PWD", "LC_CTYPE", MARK},
    ),
    "open descriptors": Kind(
        "import os\nfor i in range(3, 4096):\n  try: print('did', os.read(i, 100))\n  except OSError: pass",
        "import os\nf = open('/dev/zero', 'rb'); print('fine' if os.read(f.fileno(), 1) == b'\\0' else '')",
        lambda e: e.text == "" and e.run.succeeded,
    ),
    "own code": Kind(
        "import os\n" + caught("open('/program.py', 'w')", "os.remove('/program.py')"),
        "print('fine' if 'fine' in open('/program.py').read() else '')",
        lambda e: e.text.count("Error") == 2 and "did" not in e.text,
    ),
    "device file": Kind(
        "import os, stat\n"
        + caught("os.mknod('/tmp/d', stat.S_IFBLK | 0o666, os.makedev(8, 0))", "open('/dev/mem')", "open('/dev/tty')"),
        "open('/dev/null', 'w').write('x'); print('fine')",
        lambda e: "PermissionError" in e.text and e.text.count("FileNotFoundError") == 2,
    ),
    # -- more rights
    "kill others": Kind(
        "import os\nfor target in (1, 2, os.getppid(), -1, HOSTPID):\n  for s in (9, 15):\n"
        "    try: os.kill(target, s)\n    except OSError: pass\nprint('alive')",
        "import os; os.kill(os.getpid(), 0); print('fine')",
        lambda e: e.text == "alive\n",  # process 1 of its own namespace: nobody else to be seen
    ),
    "ptrace": Kind(
        denied("libc.ptrace(16, HOSTPID, 0, 0)"), LIBC + "print('fine' if libc.getuid() else '')", errno(EPERM)
    ),
    "memory of another process": Kind(
        denied("libc.process_vm_readv(HOSTPID, None, 0, None, 0, 0)"),
        LIBC + "print('fine' if libc.abs(-1) == 1 else '')",
        errno(EPERM),
    ),
    "become root": Kind(
        "import os\n" + caught("os.setuid(0)", "os.setgid(0)"),
        "import os; print('fine' if os.getuid() == os.getgid() == 65534 else '')",
        lambda e: e.text.count("Error") == 2 and "did" not in e.text,
    ),
    "namespaces": Kind(
        denied("libc.unshare(0x10000000)"), LIBC + "print('fine' if libc.getpid() else '')", errno(EPERM)
    ),
    "mount": Kind(
        denied("libc.mount(b'x', b'/tmp', b'tmpfs', 0, None)"), LIBC + "libc.sync(); print('fine')", errno(EPERM)
    ),
    "chroot": Kind(
        "import os\n" + caught("os.chroot('/tmp')"),
        "import os; os.chdir('/usr'); print('fine')",
        failed("PermissionError"),
    ),
    "io_uring": Kind(
        denied(f"libc.syscall({URING}, 1, 0)"), "import select; select.epoll().close(); print('fine')", errno(EPERM)
    ),
    "higher limits": Kind(
        "import resource as r\n"
        + caught(
            *(
                f"r.setrlimit(r.{name}, (-1, -1))"
                for name in ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NOFILE")
            )
        ),
        "import resource as r; r.setrlimit(r.RLIMIT_AS, (128 << 20,) * 2); print('fine')",
        lambda e: e.text.count("not allowed to raise maximum limit") == 4,
    ),
}


# -- the host's side ---------------------------------------------------------------------------------------------------

MARK = "ALULA_TEST_MARK"
"""Variable in the sandbox whose value tells its processes from all others on the machine."""


@contextmanager
def marked(sandbox: Bubblewrap) -> Iterator[str]:
    """Mark what the sandbox starts meanwhile: bubblewrap by its command line, programs by their environment."""
    mark, command = uuid.uuid4().hex, sandbox.command
    sandbox.command = [*command, "--setenv", MARK, mark]
    try:
        yield mark
    finally:
        sandbox.command = command


def programs(mark: str) -> list[int]:
    """Running processes of the marked sandbox: those with the mark, and all in their PID namespaces. Their parents do
    not matter: a process whose parent is gone belongs to process 1."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()]
    found = {pid for pid in pids if mark.encode() in contents(pid, "cmdline") + contents(pid, "environ")}
    namespaces = {namespace(pid) for pid in found} - {namespace(os.getpid()), ""}
    return [pid for pid in pids if pid in found or namespace(pid) in namespaces]


def contents(pid: int, name: str) -> bytes:
    """A file of /proc; empty once the process has ended, even if nobody has waited for it yet."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    return [int(child) for child in contents(pid, f"task/{pid}/children").split()]


def left(mark: str, seconds: float = 10) -> list[int]:
    """Marked processes that do not end. One that was killed may take a moment under load."""
    end = time.monotonic() + seconds
    while (running := programs(mark)) and time.monotonic() < end:
        time.sleep(0.01)
    return running


class Watch(threading.Thread):
    """Watches the marked processes until it is stopped: how many, and their peak memory."""

    def __init__(self, mark: str) -> None:
        super().__init__(daemon=True)
        self.mark = mark
        self.processes = self.peak_bytes = 0
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(0.01):
            seen = programs(self.mark)
            self.processes = max(self.processes, len(seen))
            for pid in seen:
                if peak := re.search(rb"^VmHWM:\s+(\d+)", contents(pid, "status"), re.MULTILINE):
                    self.peak_bytes = max(self.peak_bytes, int(peak[1]) << 10)
