"""The rollout browser: all rollouts of one prompt, token by token. All text is escaped here."""

import math
import re
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from alula.files import count_text
from alula.report.runs import Run
from alula.report.sections import run_label
from alula.run.run_dir import parse_line

HERE = Path(__file__).parent
LOW = 0.1
"""Tokens with a smaller ratio are marked, vetoed or not."""
STEP = re.compile(rb'{"step": (\d+),')


def render_rollouts(runs: list[Run], chosen: int, step: int | None, version: str) -> str:
    """The page of run number `chosen` at the recorded step nearest to `step`, by default the last one."""
    run = runs[min(max(chosen, 0), len(runs) - 1)]
    index = runs.index(run)
    steps = recorded_steps(run.path / "rollouts.jsonl")
    at = nearest(steps, step)
    group = None if at is None else read_group(run.path / "rollouts.jsonl", steps[at])
    return Template((HERE / "rollouts.html").read_text()).substitute(
        title=escape(run.name),
        version=escape(version),
        style=(HERE / "page.css").read_text() + (HERE / "rollouts.css").read_text(),
        runs=" ".join(run_link(number, one, number == index) for number, one in enumerate(runs)),
        steps=step_links(index, steps, at),
        group=nothing() if group is None else group_html(group),
        script=(HERE / "live.js").read_text(),
    )


def recorded_steps(path: Path) -> list[int]:
    """Steps in the order of the file. Only the beginning of each line is read, since lines are long."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        found = (STEP.match(line) for line in file if line.endswith(b"\n"))
        return [int(match[1]) for match in found if match]


def nearest(steps: list[int], step: int | None) -> int | None:
    """The index of the recorded step nearest to `step`; the last one for None."""
    if not steps:
        return None
    return len(steps) - 1 if step is None else min(range(len(steps)), key=lambda i: abs(steps[i] - step))


def read_group(path: Path, step: int) -> dict[str, Any] | None:
    with path.open("rb") as file:
        for line in file:
            match = STEP.match(line)
            if match and int(match[1]) == step:
                return parse_line(line)
    return None


def run_link(number: int, run: Run, current: bool) -> str:
    here = ' aria-current="page"' if current else ""
    return f'<a href="rollouts?run={number}"{here}>{run_label(number, run)}</a>'


def step_links(run: int, steps: list[int], at: int | None) -> str:
    """First, previous, next and last recorded step. The last one follows the run."""
    if at is None:
        return ""

    def link(text: str, target: int, what: str) -> str:
        if not 0 <= target < len(steps) or target == at:
            return f'<span class="quiet">{text}</span>'
        where = "" if target == len(steps) - 1 else f"&amp;step={steps[target]}"
        return f'<a href="rollouts?run={run}{where}" title="{what}">{text}</a>'

    place = f"<b>step {steps[at]:,}</b> <small>{at + 1} of {len(steps)} recorded</small>"
    before = link("« first", 0, "the first recorded step") + link("‹ earlier", at - 1, "the one before")
    after = link("later ›", at + 1, "the next one") + link("last »", len(steps) - 1, "the last one, as the run goes on")
    return before + place + after


def nothing() -> str:
    return (
        '<section><p class="quiet">This run has not written rollouts token by token. The setting '
        "<code>logging.rollouts</code> says every how many steps it does; 0 is never.</p></section>"
    )


def group_html(group: dict[str, Any]) -> str:
    prompt, veto = [str(token) for token in group["prompt"]], float(group["veto"])
    rollouts = group["rollouts"]
    rewards = [float(rollout["reward"]) for rollout in rollouts]
    summary = (
        f"{len(rollouts)} rollouts of one prompt under <code>{escape(str(group['sparsity']))}</code>, mean reward "
        f"{sum(rewards) / len(rewards):.3g}, {sum(bool(rollout['vetoed']) for rollout in rollouts)} vetoed."
    )
    text = escape("".join(prompt))
    parts = [f'<section><h2>Prompt</h2><p class="quiet">{summary}</p><pre class="prompt">{text}</pre></section>']
    parts += [rollout_html(number, prompt, rollout, veto) for number, rollout in enumerate(rollouts, 1)]
    return "".join(parts)


def rollout_html(number: int, prompt: list[str], rollout: dict[str, Any], veto: float) -> str:
    tokens = [str(token) for token in rollout["tokens"]]
    evicted = rollout["evicted"] or "0" * (len(prompt) + len(tokens))
    ratios = rollout["log_ratio"]
    kept = "".join(token_html(text, digit, None, veto) for text, digit in zip(prompt, evicted))
    answer = "".join(
        token_html(text, digit, ratio, veto, given=ratio is None)
        for text, digit, ratio in zip(tokens, evicted[len(prompt) :], ratios)
    )
    known = "" if rollout["evicted"] else "<p class='quiet'>No evictions were recorded.</p>"
    prompt_box = f'<details id="prompt-{number}"><summary>Prompt, as it was kept</summary><pre>{kept}</pre></details>'
    return (
        f'<section class="rollout"><h2>Rollout {number} <span class="badges">{badges(rollout, ratios)}</span></h2>'
        f'{known or prompt_box}<pre class="answer">{answer}</pre></section>'
    )


def badges(rollout: dict[str, Any], ratios: list[float | None]) -> str:
    reward, advantage = float(rollout["reward"]), float(rollout["advantage"])
    lowest = min((ratio for ratio in ratios if ratio is not None), default=0.0)
    words = [
        f'<b class="{"good" if reward > 0 else "bad"}">reward {reward:.3g}</b>',
        f"advantage {advantage:+.2f}",
        count_text(len(ratios), "token"),
        f"lowest ξ {ratio_text(lowest)}",
        '<b class="bad">truncated</b>' if rollout["finish"] == "length" else escape(str(rollout["finish"])),
    ]
    words += [f'<b class="bad">{name}</b>' for name in ("vetoed", "rejected", "rerolled") if rollout[name]]
    return " ".join(f"<span>{word}</span>" for word in words)


def token_html(text: str, digit: str, log_ratio: float | None, veto: float, given: bool = False) -> str:
    """One token: shaded by the share of heads that evicted it, marked by its ratio. An environment has `given` it."""
    shown = escape(text.replace("\n", "↵\n"))
    classes = [f"e{digit}"] if digit in "123456789" else []
    about = [f"evicted in {int(digit) / 9:.0%} of the heads"] if classes else []
    if given:
        classes.append("given")
        about.insert(0, "given, not sampled")
    if log_ratio is not None:
        about.insert(0, f"ξ {ratio_text(log_ratio)}")
        if log_ratio < math.log(veto):
            classes.append("veto")
            shown += f"<sup>{ratio_text(log_ratio)}</sup>"
        elif log_ratio < math.log(LOW):
            classes.append("low")
    if not about:
        return f"<i>{shown}</i>"
    named = f' class="{" ".join(classes)}"' if classes else ""
    return f'<i{named} title="{escape(" · ".join(about))}">{shown}</i>'


def ratio_text(log_ratio: float) -> str:
    return f"{math.exp(min(log_ratio, 700)):.2g}"
