"""Reads what a sandboxed program sent back and compares it with the expected values, outside the sandbox."""

import ast
import json
import sys
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from alula.data.code_tests import Test


def read_results(output: bytes) -> dict[int, tuple[bool, Any]]:
    """Test -> (finished, value or error); -1 is the program itself. Lines that are no result are skipped."""
    results: dict[int, tuple[bool, Any]] = {}
    for line in output.splitlines():
        try:
            number, finished, value = json.loads(line)
            results[int(number)] = (finished is True, decode(value) if finished is True else str(value))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            continue
    return results


class Opaque:
    """A value of another type, equal to nothing."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"<{self.kind}>"


def decode(value: Any) -> Any:
    """The value that `harness.encode` wrote."""
    if isinstance(value, list):
        return [decode(part) for part in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    match kind:
        case "int":
            return int(content, 16)
        case "float":
            return float.fromhex(content)
        case "tuple":
            return tuple(decode(content))
        case "set":
            return set(decode(content))
        case "dict":
            return dict(decode(content))
        case "bytes":
            return bytes.fromhex(content)
        case "complex":
            return complex(*decode(content))
        case "object":
            return Opaque(content)
    raise ValueError(f"unknown kind {kind!r}")


def literal(text: str) -> Any:
    """The value of a Python literal, integers of any length included."""
    digits = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return ast.literal_eval(text)
    finally:
        sys.set_int_max_str_digits(digits)


def passes(test: Test, value: Any) -> bool:
    """Whether a call's value is the expected one."""
    try:
        expected = literal(test["expected"])
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"expected={test['expected']!r:.100} is not a Python literal") from error
    try:
        return bool(expected == value) or ("tolerance" in test and close(expected, value, float(test["tolerance"])))
    except (OverflowError, RecursionError):
        return False


def close(expected: Any, value: Any, tolerance: float) -> bool:
    """Equality with a tolerance for numbers, also inside lists, tuples and dicts."""
    if isinstance(expected, int | float) and isinstance(value, int | float):
        return abs(expected - value) <= tolerance
    if isinstance(expected, list | tuple) and isinstance(value, list | tuple):
        return len(expected) == len(value) and all(close(e, v, tolerance) for e, v in zip(expected, value))
    if isinstance(expected, Mapping) and isinstance(value, Mapping):
        return expected.keys() == value.keys() and all(close(expected[key], value[key], tolerance) for key in expected)
    return bool(expected == value)


def same_output(expected: str, printed: str) -> bool:
    """Whether both texts have the same lines, up to trailing space, or the same words line by line, where numbers are
    compared by value (1.0 is 1)."""
    first, second = lines(expected), lines(printed)
    if first == second:
        return True
    return len(first) == len(second) and all(same_words(a.split(), b.split()) for a, b in zip(first, second))


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def same_words(expected: list[str], printed: list[str]) -> bool:
    return len(expected) == len(printed) and all(a == b or same_number(a, b) for a, b in zip(expected, printed))


def same_number(expected: str, printed: str) -> bool:
    try:
        return Decimal(expected) == Decimal(printed)
    except InvalidOperation:
        return False
