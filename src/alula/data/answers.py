"""Extracts final answers from text: the last box, the part after ####, the last number."""

import re
from typing import Any

SEARCHED_CHARACTERS = 1000
"""Length of the text's end that is searched for an answer that is neither boxed nor marked by ####."""

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?|-?\.\d+")
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|[{}]")
_MARKED = re.compile(r"####\s*([^\n]+)")


def final_answer(completion: str) -> str | None:
    r"""The answer as written: the last \boxed{…}, else the text after the last ####, else the last number."""
    text = after_thinking(completion)
    answer = last_boxed(text)
    if answer is not None:
        return answer
    marked = last_marked(text)
    if marked is not None:
        return marked.strip()
    numbers = _NUMBER.findall(text[-SEARCHED_CHARACTERS:])
    return numbers[-1] if numbers else None


def after_thinking(completion: str) -> str:
    """The text after the last </think>, or all of it if there is none."""
    return completion.rsplit("</think>", 1)[-1]


def last_boxed(text: str) -> str | None:
    r"""Content of the last closed, non-empty \boxed{…} or \fbox{…}, with balanced braces."""
    opened: list[tuple[int, bool]] = []  # every open brace: where its content begins, and whether it is a box
    last, found = -1, None
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append((brace.end(), brace[0] != "{"))
        elif opened:
            start, boxed = opened.pop()
            if boxed and start > last and (content := text[start : brace.start()].strip()):
                last, found = start, content
    return found


def last_marked(text: str) -> str | None:
    """The rest of the line after the last ####."""
    marked = _MARKED.findall(text)
    return marked[-1] if marked else None


def reference_text(answer: Any) -> str:
    """A reference answer as text: 27.0 becomes 27, several answers are joined, only the part after #### counts."""
    if isinstance(answer, list | tuple):
        return ", ".join(reference_text(part) for part in answer)
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    text = str(answer)
    boxed = last_boxed(text)
    return boxed if boxed is not None else text.rsplit("####", 1)[-1].strip()
