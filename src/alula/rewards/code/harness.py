"""Runs inside the sandbox: loads the program, evaluates the calls and writes the results as plain data.

This file runs alone, in the sandbox's interpreter, without the rest of the package. Nothing here is trusted: the
program can change all of it, but no expected value is here to be found. The job comes on standard input as a Python
literal; the results go to standard output, one line of JSON per test. The modules `json`, `ast` and `typing` are not
imported: each would take about as long as the start of the interpreter. `from __future__ import annotations` is not
there because what is compiled here would inherit it.
"""

import _json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

quoted = _json.encode_basestring_ascii


def encode(value: object) -> str:
    """The value as JSON; what JSON lacks is a dict with one key. Subclasses count as their base, as `==` sees them."""
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return f"{value:d}" if -(2**63) < value < 2**63 else tagged("int", f'"{value:x}"')
    if isinstance(value, float):
        return tagged("float", f'"{float.hex(value)}"')
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list):
        return encode_all(value)
    if isinstance(value, tuple):
        return tagged("tuple", encode_all(value))
    if isinstance(value, set | frozenset):
        return tagged("set", encode_all(value))
    if isinstance(value, dict):
        return tagged("dict", encode_all([list(pair) for pair in value.items()]))
    if isinstance(value, bytes):
        return tagged("bytes", f'"{value.hex()}"')
    if isinstance(value, complex):
        return tagged("complex", encode_all([value.real, value.imag]))
    return tagged("object", quoted(type(value).__name__))


def tagged(kind: str, content: str) -> str:
    return f'{{"{kind}": {content}}}'


def encode_all(values: "Iterable[object]") -> str:
    return "[" + ", ".join([encode(value) for value in values]) + "]"


def load(prelude: str, program: str, setup: str, namespace: "dict[str, Any]") -> None:
    """Run all three. A program that is only the body of the prelude's last function continues its text."""
    try:
        code = compile(program, "program", "exec")
    except SyntaxError:
        exec(compile(prelude + "\n" + program, "program", "exec"), namespace)
    else:
        exec(compile(prelude, "prelude", "exec"), namespace)
        exec(code, namespace)
    exec(compile(setup, "setup", "exec"), namespace)


def attempt(action: "Callable[..., object]", *arguments: "Any") -> str:
    """`true, <value>` or `false, "<error>"`."""
    try:
        return f"true, {encode(action(*arguments))}"
    except BaseException as error:
        return f"false, {quoted(f'{type(error).__name__}: {error}'[:300])}"


def main() -> None:
    job = eval(sys.stdin.buffer.read().decode())
    results, null = os.dup(1), os.open("/dev/null", os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    module = type(sys)("program")
    sys.modules["program"] = module  # where dataclasses and pickle look for a class of the program
    namespace = vars(module)

    def report(number: int, outcome: str) -> None:
        line = f"[{number}, {outcome}]\n".encode()
        while line:
            line = line[os.write(results, line) :]

    report(-1, attempt(load, job["prelude"], job["program"], job["setup"], namespace))
    for number, (kind, source) in enumerate(job["tests"]):
        run, variables = (eval, namespace) if kind == "call" else (exec, dict(namespace))
        report(number, attempt(run, source, variables))
    os._exit(0)


if __name__ == "__main__":
    main()
