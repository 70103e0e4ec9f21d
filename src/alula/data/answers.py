"""Extracts final answers from text: the last box, the part after ####, the last number."""

import re
from typing import Any

SEARCHED_CHARACTERS = 1000
"""Length of the text's end that is searched for an answer that is neither boxed nor marked by ####."""

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?|-?\.\d+")
_MARKED = re.compile(r"####\s*([^\n]+)")


def final_answer(completion: str, boxed_only: bool = False) -> str | None:
    r"""The answer as written: the last \boxed{…}, else the text after the last ####, else the last number."""
    text = after_thinking(completion)
    answer = last_boxed(text)
    if answer is not None or boxed_only:
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
    for start in reversed([m.end() for m in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                if text[start:end].strip():
                    return text[start:end].strip()
                break
    return None


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
