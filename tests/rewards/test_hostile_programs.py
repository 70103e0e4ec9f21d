"""Hostile programs in the real sandbox. Every kind has its own evidence that the mechanism holds (a canary file, a
listener, a count of processes, peak bytes, …) and a benign twin that must pass.

Where bubblewrap cannot run, these tests fail with its message; they never skip.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from alula.rewards.code.reward import Outcome, run_tests, script_outcome
from alula.rewards.code.sandbox import Bubblewrap, Limits
from hostile_programs import KINDS, MARK, MEMORY, SECRET, Evidence, Watch, children, contents, left, marked, programs


@pytest.fixture(scope="module")
def sandbox():
    return Bubblewrap(Limits(1, MEMORY))


@pytest.fixture(scope="module")
def bystander():
    """A process of the same user, which no program may kill."""
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"]) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def host(tmp_path_factory, monkeypatch_module, bystander):
    """What a program would reach without the sandbox: a file, listeners, a variable, an open file."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "canary").write_text(SECRET)
    monkeypatch_module.setenv("ALULA_SECRET", SECRET)
    tcp = socket.create_server(("127.0.0.1", 0))
    port = tcp.getsockname()[1]
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", port))
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(f"\0alula-hostile-{port}")
    unix.listen()
    listeners = [tcp, udp, unix]
    for listener in listeners:
        listener.setblocking(False)
    with open(folder / "canary", "rb") as opened:
        os.set_inheritable(opened.fileno(), True)
        yield {
            **{"FOLDER": folder, "PORT": port, "HOME": Path.home(), "REPOSITORY": Path(__file__).parents[2]},
            **{"HOSTPID": bystander.pid},
        }
    assert (folder / "canary").read_text() == SECRET
    for listener in (tcp, unix):
        with pytest.raises(BlockingIOError):
            listener.accept()
    with pytest.raises(BlockingIOError):
        udp.recv(1)
    for listener in listeners:
        listener.close()


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def observed(sandbox: Bubblewrap, program: str, wall: float | None, host: dict[str, Any]) -> Evidence:
    for word, value in host.items():
        program = program.replace(word, str(value))
    with marked(sandbox) as mark:
        watch = Watch(mark)
        watch.start()
        began = time.monotonic()
        run = sandbox.run(program, wall_seconds=wall)
        duration = time.monotonic() - began
    watch.stopped.set()
    watch.join()
    return Evidence(run, duration, watch.processes, watch.peak_bytes, len(left(mark)))


def test_there_are_forty_kinds():
    assert len(KINDS) + len(CHEATS) >= 40


@pytest.mark.parametrize("name", KINDS)
def test_hostile_kind(name, sandbox, host, bystander):
    kind, right = KINDS[name], {"stdout": "fine\n"}
    hostile = observed(sandbox, kind.hostile, kind.wall, host)
    assert kind.holds(hostile), hostile
    assert not script_outcome(hostile.run, right).passed
    assert SECRET not in hostile.text
    assert hostile.left == 0
    assert bystander.poll() is None
    twin = observed(sandbox, kind.benign, None, host)
    assert script_outcome(twin.run, right).passed, twin


def test_nothing_is_left_for_the_next_program(sandbox):
    writes = "import os\nos.mkdir('/tmp/a')\nopen('/tmp/a/b', 'w').write('x')\nprint(os.listdir('/tmp'))"
    assert sandbox.run(writes).output == sandbox.run(writes).output == b"['a']\n"


WORKER = """
import os, signal, sys, time
from alula.rewards.code.sandbox import Bubblewrap, Limits

box = Bubblewrap(Limits(60, 1 << 28))
box.command += sys.argv[1:4]
for moment in map(float, sys.argv[4:]):  # seconds after which a copy of this process is killed
    worker = os.fork()
    if worker == 0:
        break
    time.sleep(moment)
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
else:
    sys.exit()
box.run("import time; time.sleep(600)")
"""


def is_program(pid: int, mark: str) -> bool:
    """Whether a marked process is neither bubblewrap nor a worker, whose command lines have the mark."""
    return mark.encode() not in contents(pid, "cmdline")


@pytest.mark.slow
def test_a_program_dies_with_its_worker():
    mark, end = uuid.uuid4().hex, time.monotonic() + 60
    with subprocess.Popen([sys.executable, "-c", WORKER, "--setenv", MARK, mark, "60"]) as workers:
        # both workers, bubblewrap and the program; a process that is being replaced has no command line for a moment
        while len(found := programs(mark)) < 4 or not any(is_program(pid, mark) for pid in found):
            assert time.monotonic() < end, found
            time.sleep(0.02)
        [worker] = children(workers.pid)
        os.kill(worker, signal.SIGKILL)
        while len(programs(mark)) > 1 and time.monotonic() < end:
            time.sleep(0.02)
        assert programs(mark) == [workers.pid]
        workers.kill()


@pytest.mark.slow
def test_no_program_starts_without_its_worker():
    """Workers are killed at every moment of a start. Where bubblewrap is killed with its worker before it has let its
    child go on, the child waits for ever: bubblewrap's own, without a program."""
    mark, moments = uuid.uuid4().hex, [str(i / 1000) for i in range(0, 60, 2)]
    subprocess.run([sys.executable, "-c", WORKER, "--setenv", MARK, mark, *moments], check=True)
    waiting = left(mark, seconds=3)
    assert [pid for pid in waiting if is_program(pid, mark)] == []
    for pid in waiting:
        os.kill(pid, signal.SIGKILL)


# -- cheats: the expected value is not in the sandbox ------------------------------------------------------------------

EXPECTED = "the-expected-words-91c3"
HONEST = f"def answer(x): return '{EXPECTED[:-4]}' + x"
FORGE = "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'[0, true, %s]\\n')\n  except OSError: pass\n"

CHEATS = {
    "exit before the tests": "import os; os._exit(0)",
    "sys.exit in the program": "import sys; sys.exit(0)",
    "exit in the call": "import os\ndef answer(x): os._exit(0)",
    "print words of success": "print('1 passed'); print('[0, true, true]')\ndef answer(x): print('PASSED')",
    "forge a result": FORGE % "true" + "os._exit(0)",
    "forge every result": FORGE % '\\"passed\\"' + "def answer(x): return True",
    "equal to everything": "class Any(str):\n  def __eq__(self, other): return True\n  __hash__ = str.__hash__\n"
    "def answer(x): return Any('x')",
    "object equal to everything": "class Any:\n  def __eq__(self, other): return True\ndef answer(x): return Any()",
    "patch the harness": "import __main__\n__main__.encode = lambda value: 'true'\n"
    "__main__.attempt = lambda *a: 'true, true'\ndef answer(x): return x",
    "patch builtins": "import builtins\nbuiltins.eval = lambda *a: True\nbuiltins.isinstance = lambda *a: True\n"
    "def answer(x): return x",
    "endless result": "def answer(x): return 'x' * (100 << 20)",
    "result without end": "def answer(x):\n  r = []\n  for _ in range(10**5): r = [r]\n  return r",
    "result that contains itself": "def answer(x):\n  r = []; r.append(r); return r",
    "dictionary that hangs": "class D(dict):\n  def items(self):\n    while True: pass\ndef answer(x): return D()",
}
SEARCH = f"""
import gc, sys, __main__
def answer(x):
    frame, seen = sys._getframe(), [repr(vars(__main__))]
    while frame:
        seen.append(repr(frame.f_locals))
        frame = frame.f_back
    seen += [repr(o)[:10000] for o in gc.get_objects() if isinstance(o, (dict, list, tuple, str))]
    wanted = ''.join(reversed({EXPECTED[::-1]!r}))
    return f'{{sum(wanted in text for text in seen)}} of {{len(seen) > 100}}'
"""


def outcome(sandbox: Bubblewrap, program: str) -> Outcome:
    [found] = run_tests(
        sandbox, program, {"tests": [{"call": f"answer('{EXPECTED[-4:]}')", "expected": repr(EXPECTED)}]}
    )
    return found


@pytest.mark.parametrize("name", CHEATS)
def test_cheat(name, sandbox):
    with marked(sandbox) as mark:
        cheated = outcome(sandbox, CHEATS[name])
    assert not cheated.passed
    assert cheated.reason
    assert not left(mark)
    assert outcome(sandbox, HONEST).passed  # the same test, without the cheat


def test_the_expected_value_is_not_in_the_program_s_memory(sandbox):
    assert outcome(sandbox, SEARCH).reason == "returned '0 of True'"


def test_a_check_can_be_forged(sandbox):
    """What the docs say: statements that cannot be split are judged inside, where the program decides."""
    forged = "import os\nfor n in (-1, 0): os.write(3, b'[%d, true, null]\\n' % n)\nos._exit(0)"
    assert run_tests(sandbox, forged, {"tests": [{"check": "assert answer(1) == 2"}]})[0].passed
    assert not run_tests(sandbox, forged, {"tests": [{"call": "answer(1)", "expected": "2"}]})[0].passed
