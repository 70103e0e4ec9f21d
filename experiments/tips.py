"""An open-ended task whose rule can be checked: a numbered list of tips about a subject, each with a given word.

    Give exactly 7 tips about gardening as a numbered list, one line per tip. Use the word "water" in every tip.

What a tip says is free. Every asked tip is worth the same: half of it for a line with the right number, half for the
word in it. A tip too many costs one.
"""

import random
import re
from collections.abc import Mapping
from typing import Any

SUBJECTS = (
    "gardening cooking hiking painting chess running photography baking camping cycling swimming fishing reading "
    "writing studying sewing driving budgeting travelling sleeping teaching listening dancing singing cleaning"
)
WORDS = "water time light friend home plan morning money paper family music tool weather small careful"
FEWEST, MOST = 6, 10
SHORTEST = 4
"""Words of a tip."""


def problem(seed: str) -> dict[str, Any]:
    generator = random.Random(f"tips/{seed}")
    count = generator.randint(FEWEST, MOST)
    subject, word = (generator.choice(words.split()) for words in (SUBJECTS, WORDS))
    prompt = (
        f"Give exactly {count} tips about {subject} as a numbered list, one line per tip. "
        f'Use the word "{word}" in every tip.'
    )
    return {"prompt": prompt, "answer": str(count), "word": word}


def reward(completion: str, example: Mapping[str, Any]) -> float:
    """1 if all asked tips are there, each with the word, and no other line is numbered; never below 0."""
    asked, found = int(example["answer"]), re.findall(r"^\s*(\d+)\.\s+(.*)$", completion, re.MULTILINE)
    seen: set[str] = set()
    good = 0.0
    for place, (number, tip) in enumerate(found[:asked], start=1):
        words = re.findall(r"[a-z']+", tip.lower())
        if int(number) == place and len(words) >= SHORTEST and tip not in seen:
            good += 1.0 if example["word"] in words else 0.5
        seen.add(tip)
    return max(0.0, (good - max(0, len(found) - asked)) / asked)
