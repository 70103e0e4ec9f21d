"""Draws what a session under eviction remembers: for every token, how long how many heads keep its KV.

    python examples/session_memory.py HuggingFaceTB/SmolLM2-135M-Instruct --sparsity rkv:64+16 --out session.svg

Three turns are played on a CPU in about a minute. The picture is drawn from `Rollout.history`.
"""

import argparse
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from alula import Engine, Sampling, Sparsity
from alula.charts import COLOURS, STYLE
from alula.engine.rollout import NEVER
from alula.environments.conversation import Conversation
from alula.environments.episodes import Episode, Episodes, Start
from alula.rollouts.job import Job
from alula.rollouts.local_rollouts import LocalRollouts
from alula.settings import EnvironmentSettings

TURNS = (
    "My locker has the code 4711. Remember it. Now name three fruits.",
    "Tool result: the shop sells apples, pears, plums and cherries. Which of them are red?",
    "What is the code of my locker?",
)
LEFT, TOP, CELL, GAP = 62, 64, 4, 150
KINDS = {"prompt": COLOURS[7], "given": COLOURS[1], "sampled": COLOURS[0]}


class Script:
    """Says the lines of `TURNS`, whatever the policy answers."""

    def reset(self, example: dict[str, Any], seed: int) -> str:
        self.left = list(TURNS[1:])
        return TURNS[0]

    def step(self, completion: str) -> tuple[str, float, bool]:
        return (self.left.pop(0), 0.0, False) if self.left else ("", 0.0, True)


def play(model: str, sparsity: str, tokens: int) -> Episode:
    engine = Engine.load(model, device="cpu", kv_memory="64MiB", max_rows=1)
    settings = EnvironmentSettings(use="script", max_turns=len(TURNS), max_tokens=engine.max_length)
    episodes = Episodes(settings, Script, engine, Conversation(engine.tokenizer))
    sampling = Sampling(max_new_tokens=tokens, temperature=0.0)
    job = Job((), sampling, Sparsity.parse(sparsity), start=Start({}, 0, 0, record=True))
    [episode] = LocalRollouts(engine, episodes).generate([job])
    assert isinstance(episode, Episode)
    return episode


def kinds(episode: Episode) -> list[str]:
    sampled = ["sampled" if mine else "given" for mine in episode.sampled.tolist()]
    return ["prompt"] * len(episode.prompt_ids) + sampled


def draw(episode: Episode, title: str) -> str:
    """One row per token: its colour is its kind, its opacity the share of heads that still hold it, from left to right
    as the session grows."""
    assert episode.history is not None
    history, kind = episode.history.numpy(), kinds(episode)
    length = len(kind)
    width, height = LEFT + length * CELL + GAP, TOP + length * CELL + 46
    parts = []
    for j in range(length):
        ends = np.minimum(history[..., j].reshape(-1), length)
        ends[history[..., j].reshape(-1) == NEVER] = length
        edges = [j, *sorted(set(ends.tolist()))]
        for start, end in pairwise(edges):
            share = float((ends > start).mean())
            if share and end > start:
                parts.append(
                    f'<rect x="{LEFT + start * CELL}" y="{TOP + j * CELL}" width="{(end - start) * CELL}" '
                    f'height="{CELL}" fill="{KINDS[kind[j]]}" fill-opacity="{share:.2f}"/>'
                )
    for turn in episode.turns:
        at = len(episode.prompt_ids) + turn.start
        x, y = LEFT + at * CELL, TOP + at * CELL
        parts.append(f'<line x1="{x}" x2="{x}" y1="{TOP}" y2="{TOP + length * CELL}" class="turn"/>')
        words = " ".join(turn.completion.split())
        short = words if len(words) < 24 else words[:22] + "…"
        parts.append(f'<text x="{x - 6}" y="{y + 16}" text-anchor="end" font-size="11">{escape(short)}</text>')
    for i, (name, colour) in enumerate(KINDS.items()):
        x, y = LEFT + length * CELL + 14, TOP + 12 + 18 * i
        parts.append(f'<rect x="{x}" y="{y - 9}" width="11" height="11" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="{y}" font-size="12">{name} tokens</text>')
    style = STYLE + ".turn {stroke: #888; stroke-dasharray: 3 3}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'shape-rendering="crispEdges">'
        f'<style>{style}</style><rect class="paper" width="{width}" height="{height}"/>'
        f'<text class="title" x="{LEFT}" y="24" font-size="15">{escape(title)}</text>'
        f'<text x="{LEFT}" y="42" font-size="12">opacity: share of heads, over all layers, that hold the token</text>'
        f'<text x="{LEFT}" y="{height - 14}" font-size="12">tokens of the session so far →</text>'
        f'<text transform="translate({LEFT - 12} {TOP + length * CELL}) rotate(-90)" font-size="12">'
        f"first token at the top</text>{''.join(parts)}</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="hub id, folder or GGUF file")
    parser.add_argument("--sparsity", default="rkv:64+16")
    parser.add_argument("--tokens", type=int, default=40, help="most tokens of a turn")
    parser.add_argument("--out", type=Path, default=Path("session.svg"))
    arguments = parser.parse_args()
    episode = play(arguments.model, arguments.sparsity, arguments.tokens)
    arguments.out.write_text(draw(episode, f"What a session remembers under {arguments.sparsity}"))
    for turn in episode.turns:
        print(f"> {turn.completion.strip()}")
    held = (episode.history == NEVER).float().mean((0, 1))  # type: ignore[union-attr]
    total = len(episode.prompt_ids) + len(episode)
    print(f"{total} tokens, of which a head holds {held.sum():.0f} at the end; {episode.kv.evictions} evictions")
    for name in KINDS:
        rows = [i for i, kind in enumerate(kinds(episode)) if kind == name]
        print(f"{name}: {held[rows].mean():.0%} held")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
