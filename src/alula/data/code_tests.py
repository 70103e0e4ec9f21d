"""Tests of coding tasks: the format of a row's `tests` field, and how a data set's asserts are split into it.

`tests` is a list, or its JSON text. Each test is a dict of one of three kinds:

- `{"call": "add(1, 2)", "expected": "3"}`: a Python expression over the answer's program, and the Python literal that
  it must equal. An optional `"tolerance": 1e-6` compares numbers approximately.
- `{"stdin": "1 2\\n", "stdout": "3\\n"}`: the program runs as a script with this input and must print this output.
- `{"check": "assert add(1, 2) < 4"}`: statements that raise if the answer is wrong, for tests without a fixed expected
  value. They run next to the program, which can tamper with them; the other two kinds keep the expected value outside.

Two further fields are optional: `prelude`, code to run before the program, such as imports and helper functions of the
prompt (HumanEval's `prompt`), and `setup`, code to run after it and before the tests (MBPP's `test_setup_code`).
"""

import ast
import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Test = dict[str, Any]

KINDS = {"call": ("call", "expected"), "stdin": ("stdin", "stdout"), "check": ("check",)}
"""Kind of a test -> its required keys, which hold text."""


def read_tests(example: Mapping[str, Any]) -> list[Test]:
    """The example's tests, validated. Keys with None count as missing: Arrow tables fill them in."""
    value = example.get("tests")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"the field tests is not valid JSON: {error}") from error
    if not isinstance(value, Sequence) or not value:
        raise ValueError("the example has no tests; give it a field tests with a list of tests")
    return [checked(test, number) for number, test in enumerate(value, 1)]


def checked(test: Any, number: int) -> Test:
    keys = {key: value for key, value in test.items() if value is not None} if isinstance(test, Mapping) else {}
    kind = kind_of(keys)
    valid = kind is not None and all(isinstance(keys.get(key), str) for key in KINDS[kind])
    allowed = () if kind is None else (*KINDS[kind], "tolerance") if kind == "call" else KINDS[kind]
    if not valid or not set(keys) <= set(allowed):
        raise ValueError(f"test {number} is neither call and expected, nor stdin and stdout, nor check: {test!r:.200}")
    return keys


def kind_of(test: Mapping[str, Any]) -> str | None:
    return next((kind for kind in KINDS if kind in test), None)


def call_test(function: str, arguments: Iterable[Any], expected: Any) -> Test:
    """A call with plain values, as in LiveCodeBench and TACO. A tuple result counts as a list, since JSON has none."""
    call = f"{function}({', '.join(map(repr, arguments))})"
    return {"call": f"(lambda r: list(r) if isinstance(r, tuple) else r)({call})", "expected": repr(expected)}


# -- splitting asserts -------------------------------------------------------------------------------------------------


def split_asserts(source: str) -> list[Test]:
    """Tests from top-level asserts, as in MBPP's `test_list`. What cannot be split becomes one `check`."""
    return split(ast.parse(source).body, lambda rest: rest)


def split_check_function(source: str, entry_point: str) -> list[Test]:
    """Tests from HumanEval's `check(candidate)`, with the candidate replaced by the entry point."""
    module = ast.parse(source)
    function = next(s for s in module.body if isinstance(s, ast.FunctionDef) and s.name == "check")
    candidate = function.args.args[0].arg
    helpers = [s for s in module.body if s is not function]

    def as_check(rest: list[ast.stmt]) -> list[ast.stmt]:
        function.body = rest
        return [*helpers, function, *ast.parse(f"check({entry_point})").body]

    return split(function.body, as_check, {candidate: entry_point})


def split_inputs_and_results(source: str, entry_point: str) -> list[Test]:
    """Tests from EvalPlus' lists `inputs` and `results`, compared with its tolerance of 1e-6."""
    lists = {
        target.id: constant(node.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in ("inputs", "results")
    }
    inputs, results = lists.get("inputs"), lists.get("results")
    if inputs is None or results is None or len(inputs[0]) != len(results[0]):
        raise ValueError("the tests have no lists `inputs` and `results` of the same length")
    return [
        {"call": f"{entry_point}(*{arguments!r})", "expected": repr(result), "tolerance": 1e-6}
        for arguments, result in zip(inputs[0], results[0])
    ]


def split(
    body: list[ast.stmt],
    as_check: Callable[[list[ast.stmt]], list[ast.stmt]],
    rename: Mapping[str, str] | None = None,
) -> list[Test]:
    """A call test for every assert that compares with a constant, and one check of the other statements."""
    local = {name for statement in body for name in assigned(statement)}
    tests: list[Test] = []
    rest: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Constant) and statement.test.value:
            continue  # `assert True`
        test = split_assert(statement, local)
        if test is None:
            rest.append(statement)
        else:
            call = ast.unparse(Rename(rename or {}).visit(test.pop("call")))
            tests.append({"call": call, **test})
    if any(isinstance(node, ast.Assert) for statement in rest for node in ast.walk(statement)):
        module = ast.Module(as_check(rest), [])
        tests.append({"check": ast.unparse(ast.fix_missing_locations(module))})
    return tests


def split_assert(statement: ast.stmt, local: set[str]) -> dict[str, Any] | None:
    """{call: expression, expected: text, …} of an assert that can be split, else None."""
    if not isinstance(statement, ast.Assert) or local & names(statement):
        return None
    match statement.test:
        case ast.Compare(left=ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(left, ast.Sub(), right)])) as compared:
            expected, tolerance = constant(right), constant(compared.comparators[0])
            if isinstance(compared.ops[0], ast.Lt | ast.LtE) and expected and tolerance:
                return {"call": left, "expected": repr(expected[0]), "tolerance": tolerance[0]}
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]) if expected := constant(right):
            return {"call": left, "expected": repr(expected[0])}
        case ast.Compare(ops=[ast.Is()], comparators=[ast.Constant()]) as identity:
            return {"call": identity, "expected": "True"}
        case ast.UnaryOp(ast.Not(), ast.Call() as call):
            return {"call": as_bool(call), "expected": "False"}
        case ast.Call() as call:
            return {"call": as_bool(call), "expected": "True"}
    return None


def as_bool(expression: ast.expr) -> ast.expr:
    return ast.Call(ast.Name("bool", ast.Load()), [expression], [])


def names(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def assigned(statement: ast.stmt) -> set[str]:
    """Names that a statement binds."""
    bound = {
        child.id for child in ast.walk(statement) if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)
    }
    if isinstance(statement, ast.Import | ast.ImportFrom):
        bound |= {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    return bound


class Rename(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.names.get(node.id, node.id), node.ctx)


_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "list": list,
    "set": set,
    "frozenset": set,  # equal to it, and a literal
    "sorted": sorted,
    "dict": dict,
}


def constant(node: ast.expr) -> tuple[Any] | None:
    """The value of a literal, of arithmetic on numbers or of a conversion such as `tuple([1, 2])`, in a tuple; None for
    any other expression. Nothing else is evaluated: the expression comes from a data set."""
    try:
        return (ast.literal_eval(node),)
    except (ValueError, TypeError):
        pass
    match node:
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            values = [constant(part) for part in parts]
            if all(values):
                return ((tuple if isinstance(node, ast.Tuple) else list)(value[0] for value in values if value),)
        case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC:
            first, second = constant(left), constant(right)
            if first and second and all(isinstance(v, int | float) for v in (*first, *second)):
                try:
                    return (_ARITHMETIC[type(op)](*first, *second),)
                except ArithmeticError:  # such as a division by zero
                    return None
        case ast.Call(ast.Name(id), [argument], []) if id in _CONVERSIONS:
            value = constant(argument)
            try:
                return value and (_CONVERSIONS[id](*value),)
            except (TypeError, ValueError):  # such as a set of sets
                return None
    return None
