"""`math`: is the final answer of a solution right? Equality by math-verify, extraction by `alula.data.answers`."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from alula.data.answers import SEARCHED_CHARACTERS, after_thinking, last_boxed, last_marked, reference_text

TINY = 1e-3
"""Numbers below this are compared with this relative tolerance."""

_SCIENTIFIC = re.compile(r"(?<![\w\\])(-?\d+\.?\d*|-?\.\d+)[eE]([-+]?\d+)\b")
_TEXT_UNIT = re.compile(
    r"(?<=[\d})])(?:\s|~|\\,|\\ )*\\(?:text|mathrm|textrm|mbox)\s*\{[^{}]*\}(?:\s*\^\s*\{?-?\d\}?)?$"
)
_WORD_UNIT = re.compile(r"^(-?[\d,.]+)\s+(?!(?:or|and|pi|sin|cos|tan|log|ln|sqrt|mod)\b)[A-Za-z]{2,}[A-Za-z ]*$")
_SET_BUILDER = re.compile(r"^\\\{\s*[a-z]\s*(?:\||\\mid|:)\s*(.*?)\s*\\\}$")


def build(boxed_only: bool = False) -> Callable[[str, Mapping[str, Any]], float]:
    """The grader: 1 if the completion's final answer equals `example["answer"]`, else 0.

    With `boxed_only`, an answer outside \\boxed{…} scores 0.
    """
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeout is off; ours is on
    latex = math_verify.LatexExtractionConfig(boxed_match_priority=0)
    # Its list of units holds single letters, which turns both a+b+c and a+b+d into "a +": units are cut in _wrap.
    latex = replace(latex, normalization_config=replace(latex.normalization_config, units=False))
    patterns = [latex, math_verify.ExprExtractionConfig()]

    def parse(text: str) -> list[Any]:
        return math_verify.parse(text, patterns, parsing_timeout=None)

    def grade(completion: str, example: Mapping[str, Any]) -> float:
        gold = parse(_wrap(reference_text(example["answer"])))
        if not gold:
            raise ValueError(f"the reference answer {example['answer']!r} cannot be read")
        text = after_thinking(completion)
        answer = last_boxed(text)
        if answer is None and not boxed_only:
            answer = last_marked(text)
        if answer is not None:
            given = parse(_wrap(answer))
        else:
            given = [] if boxed_only else parse(_SCIENTIFIC.sub(_power, text[-SEARCHED_CHARACTERS:]))
        equal = math_verify.verify(gold, given, timeout_seconds=None, allow_set_relation_comp=True)
        return float(equal and not _confuses_tiny_numbers(gold[0], given[0]))

    grade("\\boxed{\\frac{1}{2}}", {"answer": "0.5"})  # builds the parser now, outside any answer's timeout
    return grade


def _wrap(answer: str) -> str:
    """Normalise an answer for the parser: no dollars, units or set-builder braces, and 4.5e33 written as a power
    (the parser would read 4.5·e·33)."""
    text = answer.replace("\\$", "").replace("$", "").replace(",\\!", "").strip().rstrip(".")
    text = _WORD_UNIT.sub(r"\1", _TEXT_UNIT.sub("", text))
    text = _SET_BUILDER.sub(r"\1", text)
    return "\\boxed{" + _SCIENTIFIC.sub(_power, text) + "}"


def _confuses_tiny_numbers(gold: Any, given: Any) -> bool:
    """math-verify rounds to six decimals, where all of 2.9e-19, 1.3e-27 and 0 are equal."""
    if not (getattr(gold, "is_real", False) and getattr(given, "is_real", False)):
        return False
    if not (gold.is_number and given.is_number):
        return False
    right, written = gold.evalf(15), given.evalf(15)  # no floats: they overflow at 2^1024
    return bool(0 < abs(right) < TINY and abs(written - right) > TINY * abs(right))


def _power(match: re.Match[str]) -> str:
    return f"{match[1]}\\times 10^{{{match[2]}}}"
