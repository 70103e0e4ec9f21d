"""A grading process: builds its graders once, then grades one answer at a time until its parent exits."""

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from alula.errors import with_place
from alula.rewards.graders import Grader, build
from alula.terminal import broken_pipe_safe


def main(channel: Connection) -> None:
    """Protocol: receives [(name, options), …], a time limit and a memory limit in bytes, sends ('ready', None) or
    ('broken', reason); then for each (grader, completion, example) sends ('value', float) or ('failed', reason)."""
    threading.Thread(target=die_with_parent, args=(os.getppid(),), daemon=True).start()
    # a closed pipe must not change a reward
    sys.stdout, sys.stderr = broken_pipe_safe(sys.stdout), broken_pipe_safe(sys.stderr)
    specs, timeout, memory = channel.recv()
    limit_memory(memory)
    try:
        graders = [build(name, options, timeout) for name, options in specs]
    except Exception as error:
        channel.send(("broken", with_place(error)))
        return
    channel.send(("ready", None))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            grader, completion, example = channel.recv()
            # The parent kills a worker that hangs. If the parent is dead, the kernel does: a worker stuck in a regular
            # expression holds the interpreter and runs no Python code.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, timeout + 1)
            reply = answer(graders[grader], completion, example)
            signal.setitimer(signal.ITIMER_REAL, 0)
            channel.send(reply)


def limit_memory(size: int) -> None:
    """Limit the private memory that this process can write, so that 9^9^9^9 does not exhaust the machine's. Address
    space would be the wrong measure: importing torch maps more of it than it ever uses."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (size if hard < 0 else min(size, hard), hard))


def answer(grade: Grader, completion: str, example: dict[str, Any]) -> tuple[str, float | str]:
    try:
        value = grade(completion, example)
    except BaseException as error:  # also a function that calls exit()
        return "failed", with_place(error)
    try:
        return "value", float(value)
    except Exception:  # also of an integer that is too large
        return "failed", f"it returned a {type(value).__name__} instead of a number"


def die_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)  # including processes that user functions started


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
