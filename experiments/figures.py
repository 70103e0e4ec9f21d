"""SVG figures from the raw files, written next to them.

python experiments/figures.py                 # all
python experiments/figures.py collapse tiny   # one question on one bed
python experiments/figures.py speed
"""

import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import fmean

import judge
from arms import PARTS
from judge import Row
from lines import read_lines
from long_tables import generated
from tables import RESULTS, before_training, by_arm, raw

from alula.charts import COLOURS, Line, Look, chart, look

BED_NAMES = {
    "tiny": "tiny bed",
    "smollm2": "SmolLM2-135M",
    "smollm2-2": "SmolLM2-135M, second warm-up",
    "smollm2-3": "SmolLM2-135M, third warm-up",
    "smollm2-4": "SmolLM2-135M, fourth warm-up",
    "programs": "programs bed",
    "gsm8k": "SmolLM2-135M on GSM8K",
    "gsm8k-2": "SmolLM2-135M on GSM8K, second warm-up",
    "search": "search bed, SmolLM2-135M",
}

ARMS = (
    "dense",
    "naive",
    "sparse-rl",
    "strict",
    "reroll",
    "tis",
    "reject-only",
    "reweight-only",
    "veto-1e-3",
    "veto-1e-5",
)
ARMS += ("sparse-rl-code", "kept-baseline", "reject-kept", "reject-1e-3", "kept-1e-3", "strict-1e-2", "start")
METHODS = ("rkv", "snapkv", "streaming", "keydiff", "h2o", "tova", "knorm", "random", "block-topk", "quest")
DASHES = {"corrected": "14 4", "distilled first": "8 3 2 3", "distilled": "2 3", "snapkv held": "2 3"}
DASHES |= {"streaming held": "8 3 2 3", "keydiff held": "14 4", "held": "8 3"}
"""What a run has in addition to its correction -> the dashes of its line; the first that applies."""


def look_of(arm: str) -> Look:
    """Colour and dashes of an arm, the same in every figure: the colour by correction, the dashes by what is added."""
    first, *added = arm.replace("dense, sparse-rl", "dense, corrected").split(", ")
    named = [word for word in (*first.split(), *added) if word in ARMS]
    style = look(ARMS.index(named[-1]))
    extra = " ".join([first.split()[0], *added]).replace(f" {named[-1]}", "")
    dash = next((dash for words, dash in DASHES.items() if all(word in extra.split() for word in words.split())), "")
    milder = "5 2" if "milder" in added else ""
    return {"colour": style["colour"], "dash": dash or style["dash"] or milder}


def over_steps(runs: Sequence[Row], points: Callable[[Row], list[tuple[int, float]]]) -> Line:
    """Mean over seeds, with a band from the lowest to the highest seed."""
    by_step: dict[int, list[float]] = {}
    for run in runs:
        for step, value in points(run):
            by_step.setdefault(step, []).append(value)
    steps = [step for step in sorted(by_step) if len(by_step[step]) == len(runs)]
    values = [by_step[step] for step in steps]
    lowest, highest = [*map(min, values)], [*map(max, values)]
    return Line(runs[0]["arm"], steps, [*map(fmean, values)], lowest, highest, **look_of(runs[0]["arm"]))


def smoothed(metric: str, width: int = 5) -> Callable[[Row], list[tuple[int, float]]]:
    def points(run: Row) -> list[tuple[int, float]]:
        values = run["steps"][metric]
        return [(i + 1, fmean(values[max(0, i + 1 - width) : i + 1])) for i in range(len(values))]

    return points


def learning(question: str, bed: str) -> dict[str, str]:
    """Accuracy, reward and length over training: one line per arm, one figure per group of arms."""
    groups: dict[str, list[list[Row]]] = {}
    for label, runs in by_arm(raw(question, bed)).items():
        groups.setdefault(group(question, label), []).append(runs)
    common = groups.pop("", [])
    where = BED_NAMES[bed]
    kinds = {
        "accuracy": (f"Held-out accuracy of the dense policy, {where}", "accuracy", judge.dense_accuracy),
        "reward": (f"Reward of the rollouts, {where}", "mean of five steps", smoothed("reward/mean")),
        "length": (f"Response length, {where}", "tokens, mean of five steps", smoothed("response/length_mean")),
    }
    drawn = {}
    for suffix, arms in groups.items() or [("", [])]:
        for name, (title, unit, points) in kinds.items():
            lines = [over_steps(runs, points) for runs in common + arms]
            drawn["-".join(filter(None, [name, suffix]))] = chart(title, "step", unit, lines)
    return drawn


def group(question: str, label: str) -> str:
    """The figure that an arm belongs to; '' means every figure."""
    if question == "correction":
        if label.endswith("milder"):
            return "milder"
        return "strict" if label == "strict" or label in PARTS else "tempting"
    if question == "distill":
        return label.split(",")[0]
    if question == "control" and label != "dense":
        return ("rkv" if label.startswith("rkv") else "others") + ("-10" if "10 %" in label else "")
    if question == "compressors" and not label.startswith("dense"):
        return label.split()[0]
    if question == "transfer" and label != "dense":
        return label.split(",")[0]
    return ""


def probed(question: str, bed: str) -> dict[str, str]:
    """Careful chains and tail by budget, before any training."""
    rows = raw("probe", bed)

    def lines(name: str) -> list[Line]:
        by_method: dict[str, dict[float, list[float]]] = {}
        for row in rows:
            method, _, rest = row["sparsity"].partition(":")
            size = rest.split("+")[0].split(",")[0]
            if size.isdigit() and row[name] is not None:  # neither dense nor a schedule
                budget = float(size)
                by_method.setdefault(method, {}).setdefault(budget, []).append(row[name])
        return [
            Line(
                method,
                [*by],
                [fmean(v) for v in by.values()],
                [min(v) for v in by.values()],
                [max(v) for v in by.values()],
                **look(METHODS.index(method)),
                dots=True,
            )
            for method, by in by_method.items()
        ]

    where = BED_NAMES[bed]
    return {
        "careful": chart(f"Careful chains that are right, {where}", "budget (KV tokens)", "share", lines("careful")),
        "tail": chart(f"Tail of acceptance, {where}", "budget (KV tokens)", "5th percentile", lines("tail")),
    }


def dose(question: str, bed: str) -> dict[str, str]:
    """The outcome against the tail and the vetoes before training: one line per method and model."""
    before, all_runs = before_training(bed), raw(question, bed)
    several = len({run["seed"] for run in all_runs}) > 1
    kinds: dict[str, list[Row]] = {}
    for run in all_runs:
        kind = run["sparsity"].partition(":")[0]
        kinds.setdefault(f"{kind}, seed {run['seed']}" if several else kind, []).append(run)

    def lines(name: str) -> list[Line]:
        drawn = []
        for kind, runs in kinds.items():
            points = sorted((before(run)[name], judge.final(run)) for run in runs)
            method, _, seed = kind.partition(", seed ")
            style = look(METHODS.index(method) + len(COLOURS) * (int(seed) if seed else 0))
            drawn.append(Line(kind, [x for x, _ in points], [y for _, y in points], **style, dots=True))
        starts = [judge.start(run) for runs in kinds.values() for run in runs]
        known = [row[name] for row in raw("probe", bed)]
        edges = [min(known), max(known)]
        return [*drawn, Line("start", edges, [fmean(starts)] * 2, colour="#999999", dash="5 4")]

    where = BED_NAMES[bed]
    return {
        "tail": chart(f"Outcome against the tail, {where}", "tail before training", "final accuracy", lines("tail")),
        "vetoed": chart(
            f"Outcome against vetoes, {where}",
            "vetoed rollouts before training",
            "final accuracy",
            lines("vetoed_rollouts"),
        ),
    }


def saving(question: str, bed: str) -> dict[str, str]:
    """Final accuracy against KV saved before training: one line per correction, one point per budget."""
    before = before_training(bed)
    by_correction: dict[str, list[tuple[float, list[float]]]] = {}
    for runs in by_arm(raw(question, bed)).values():
        if runs[0]["sparsity"] != "dense":
            x = fmean(before(run)["kv_saved"] for run in runs)
            by_correction.setdefault(runs[0]["correction"], []).append((x, [*map(judge.final, runs)]))
    lines = []
    for name, points in by_correction.items():
        xs, ys = zip(*sorted(points))
        lines.append(Line(name, xs, [*map(fmean, ys)], [*map(min, ys)], [*map(max, ys)], **look_of(name), dots=True))
    title = f"Final accuracy against KV saved, {BED_NAMES[bed]}"
    return {"saved": chart(title, "KV saved before training", "final accuracy", lines)}


def survival(question: str, bed: str) -> dict[str, str]:
    """Careful chains that are right under each policy: one line per arm that still writes them."""
    cells: dict[str, dict[str, list[Row]]] = {}
    for row in raw(question, bed):
        cells.setdefault(row["arm"], {}).setdefault(row["policy"], []).append(row)
    names = list(next(iter(cells.values())))
    lines: list[Line] = []
    for arm, by_policy in cells.items():
        if fmean(row["careful_share"] for rows in by_policy.values() for row in rows) < 0.5:
            continue
        right = [fmean(row["careful"] for row in rows) for rows in by_policy.values()]
        lines.append(Line(arm, [*map(names.index, by_policy)], right, **look_of(arm), dots=True))
    title = f"Careful chains right under each policy, {BED_NAMES[bed]}"
    return {"chains": chart(title, "", "share", lines, x_names=names)}


def equal_accuracy(question: str, bed: str) -> dict[str, str]:
    """Accuracy over steps, generated tokens and seconds of the first seed, without evaluations and checkpoints; seconds
    of the runs that had the device for themselves."""
    runs = [run for run in raw(question, bed) if run["seed"] == 0]
    axes: dict[str, tuple[str, Callable[[Row], Sequence[float]]]] = {
        "steps": ("step", lambda run: [1.0] * len(generated(run))),
        "tokens": ("million generated tokens", lambda run: [tokens / 1e6 for tokens in generated(run)]),
        "seconds": ("seconds of rollouts, scoring and updates", without_compilation),
    }
    title, drawn = f"Held-out accuracy of the dense policy, {BED_NAMES[bed]}", {}
    for name, (label, costs) in axes.items():
        comparable = [run for run in runs if name != "seconds" or not run["shared"]]
        if len(comparable) > 1:
            lines = [over_costs(run, [0.0, *accumulate(costs(run))]) for run in comparable]
            drawn[name] = chart(title, label, "accuracy", lines)
    return drawn


def without_compilation(run: Row) -> list[float]:
    """Seconds of each step; the first, which compiles, counts as long as the second."""
    _, second, *later = run["steps"]["time/step"]
    return [second, second, *later]


def over_costs(run: Row, spent: Sequence[float]) -> Line:
    xs, ys = zip(*((spent[step], accuracy) for step, accuracy in judge.dense_accuracy(run)))
    style = look_of(run["arm"].replace("as many as strict keeps", "held"))
    return Line(run["arm"], xs, ys, **style, dots=True)


def breakeven() -> str:
    """Speed-up by response length, from the lines of speed.py."""
    rows = read_lines(RESULTS / "speed" / "breakeven.jsonl")
    lengths = [row["length"] for row in rows]
    alone, scored = ([row[name] for row in rows] for name in ("rollout_ratio", "with_scoring"))
    lines = [
        Line("rollouts alone", lengths, alone, dots=True),
        Line("with the scoring pass", lengths, scored, **look(1), dots=True),
        Line("as fast as dense", [0, lengths[-1]], [1, 1], colour="#999999", dash="5 4"),
    ]
    title = "rkv 512+128 against dense, qwen3-1.7b, batch of 64 (estimate)"
    return chart(title, "response tokens", "speed-up", lines)


FIGURES: dict[str, Callable[[str, str], dict[str, str]]] = {
    "collapse": learning,
    "compressors": learning,
    "correction": learning,
    "distill": learning,
    "control": learning,
    "transfer": learning,
    "probe": probed,
    "threshold": dose,
    "budget": saving,
    "robustness": survival,
    "equal-accuracy": equal_accuracy,
    "few-vetoes": equal_accuracy,
    "int8": equal_accuracy,
}


def draw(question: str, bed: str) -> None:
    if raw(question, bed):
        for name, svg in FIGURES[question](question, bed).items():
            (RESULTS / question / f"{bed}-{name}.svg").write_text(svg)


def main() -> None:
    questions = [name for name in FIGURES if len(sys.argv) < 2 or name == sys.argv[1]]
    beds = [sys.argv[2]] if len(sys.argv) > 2 else list(BED_NAMES)
    for question in questions:
        for bed in beds:
            draw(question, bed)
    if len(sys.argv) == 1 or "speed" in sys.argv:
        (RESULTS / "speed" / "breakeven.svg").write_text(breakeven())


if __name__ == "__main__":
    main()
