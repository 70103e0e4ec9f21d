"""Is the final answer of a mathematical solution right? Extraction by hand, equality by math-verify."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from alula.errors import unknown

TAIL = 1000
"""Characters searched for an answer that is neither boxed nor marked; math-verify's patterns are slow on long text."""

TINY = 1e-3
"""Below this a number must be right to this share of itself."""

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?|-?\.\d+")
_SCIENTIFIC = re.compile(r"(?<![\w\\])(-?\d+\.?\d*|-?\.\d+)[eE]([-+]?\d+)\b")
_TEXT_UNIT = re.compile(
    r"(?<=[\d})])(?:\s|~|\\,|\\ )*\\(?:text|mathrm|textrm|mbox)\s*\{[^{}]*\}(?:\s*\^\s*\{?-?\d\}?)?$"
)
_WORD_UNIT = re.compile(r"^(-?[\d,.]+)\s+(?!(?:or|and|pi|sin|cos|tan|log|ln|sqrt|mod)\b)[A-Za-z]{2,}[A-Za-z ]*$")
_SET_BUILDER = re.compile(r"^\\\{\s*[a-z]\s*(?:\||\\mid|:)\s*(.*?)\s*\\\}$")
_MARKED = re.compile(r"####\s*([^\n]+)")


def final_answer(completion: str, boxed_only: bool = False) -> str | None:
    r"""The answer as written: the last \boxed{…}, else what follows the last ####, else the last number."""
    text = after_thinking(completion)
    answer = last_boxed(text)
    if answer is not None or boxed_only:
        return answer
    marked = _MARKED.findall(text)
    if marked:
        return marked[-1].strip()
    numbers = _NUMBER.findall(text[-TAIL:])
    return numbers[-1] if numbers else None


def after_thinking(completion: str) -> str:
    """What follows the last </think>; everything where there is none."""
    return completion.rsplit("</think>", 1)[-1]


def last_boxed(text: str) -> str | None:
    r"""Content of the last closed, non-empty \boxed{…} or \fbox{…}, braces balanced."""
    for start in reversed([m.end() for m in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                if text[start:end].strip():
                    return text[start:end].strip()
                break
    return None


def plain(answer: Any) -> str:
    """A reference answer as text: 27.0 is 27, several answers are joined, the part after #### counts."""
    if isinstance(answer, list | tuple):
        return ", ".join(plain(part) for part in answer)
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    text = str(answer)
    boxed = last_boxed(text)
    return boxed if boxed is not None else text.rsplit("####", 1)[-1].strip()


def build(options: Mapping[str, Any]) -> Callable[[str, Mapping[str, Any]], float]:
    """`math`: 1 where the completion's final answer equals `example["answer"]`, else 0.

    `boxed_only` grants nothing to an answer outside \\boxed{…}.
    """
    for option in options:
        if option != "boxed_only":
            raise unknown("option of the reward math", option, ["boxed_only"])
    boxed_only = bool(options.get("boxed_only", False))
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeout is off: ours is on
    latex = math_verify.LatexExtractionConfig(boxed_match_priority=0)
    # Its list of units holds single letters, which turns both a+b+c and a+b+d into "a +": units are cut in _wrap.
    latex = replace(latex, normalization_config=replace(latex.normalization_config, units=False))
    patterns = [latex, math_verify.ExprExtractionConfig()]

    def parse(text: str) -> list[Any]:
        return math_verify.parse(text, patterns, parsing_timeout=None)

    def grade(completion: str, example: Mapping[str, Any]) -> float:
        gold = parse(_wrap(plain(example["answer"])))
        if not gold:
            raise ValueError(f"the reference answer {example['answer']!r} cannot be read")
        text = after_thinking(completion)
        answer = last_boxed(text)
        if answer is None and not boxed_only:
            marked = _MARKED.findall(text)
            answer = marked[-1] if marked else None
        if answer is not None:
            given = parse(_wrap(answer))
        else:
            given = [] if boxed_only else parse(_SCIENTIFIC.sub(_power, text[-TAIL:]))
        equal = math_verify.verify(gold, given, timeout_seconds=None, allow_set_relation_comp=True)
        return float(equal and not _confuses_tiny_numbers(gold[0], given[0]))

    grade("\\boxed{\\frac{1}{2}}", {"answer": "0.5"})  # the first call builds the parser: not on an answer's time
    return grade


def _wrap(answer: str) -> str:
    """Both sides take the same way into the parser: without dollars, units and set-builder braces, and with
    4.5e33 written as a power, which the parser would read as 4.5·e·33."""
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
