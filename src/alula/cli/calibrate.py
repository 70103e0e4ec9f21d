"""`alula calibrate`: measures how far sparse policies are from the dense one, by length, as a file and a plot.

It has modes: without one it runs cli/tails.py, with --verify, --vetoed or --leaderboard the file of that name
(--vetoed: cli/find_budget.py). The checks of all options, the model and the prompts are here.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from alula.cli import options as shared
from alula.cli.common import Engines, check_output_file, load_model_and_prompts
from alula.errors import SettingError, require

if TYPE_CHECKING:
    from alula.data import Dataset
    from alula.engine.engine import Engine
    from alula.mismatch.calibrate.calibrate import TextSettings
    from alula.sparsity.policy import Sparsity

PAGES, QUANTILE, CONFIDENCE = "16", 0.05, 0.95
"""Defaults of options."""


def calibrate(
    model: shared.Model,
    data: shared.Prompts,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Selectors and evictors, separated by commas; the syntax is above. By default block-topk; with "
            "--leaderboard, all."
        ),
    ] = None,
    budgets: Annotated[
        str | None,
        typer.Option(
            help="KV tokens, separated by commas; by default Sparrow's grid below the length, with --vetoed from a "
            "thirty-second of the length."
        ),
    ] = None,
    pages: Annotated[
        str,
        typer.Option(help="Block sizes of selectors, separated by commas; the first is --leaderboard's page size."),
    ] = PAGES,
    length: Annotated[
        int, typer.Option(help="Longest sequence, prompt included; prompts above half of it are left out.")
    ] = 4096,
    prompts: Annotated[int, typer.Option(help="Number of prompts.")] = 64,
    samples: Annotated[int, typer.Option(help="Rollouts per prompt.")] = 1,
    bin_width: Annotated[
        int | None, typer.Option("--bin", help="Tokens per length bin; by default 2000, or an eighth of the length.")
    ] = None,
    tau: Annotated[
        list[float] | None, typer.Option(help="Threshold to search for (repeatable); by default dense floor - 0.085.")
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Measure every budget instead of searching.")] = False,
    forward: Annotated[bool, typer.Option(help="Build growing schedules for evictors, bin by bin.")] = True,
    text: Annotated[
        str, typer.Option(help="dense: measure all budgets on the dense policy's text; own: each on its own rollouts.")
    ] = "dense",
    quantile: Annotated[float, typer.Option(help="The quantile of acceptance that is the tail.")] = QUANTILE,
    confidence: Annotated[float, typer.Option(help="Confidence of the bands, over all bins together.")] = CONFIDENCE,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature, for the dense text and the sparse policies.")
    ] = 1.0,
    seed: shared.Seed = 0,
    split: shared.Split = None,
    data_dir: shared.DataDir = None,
    prompt: shared.PromptTemplate = None,
    chat: shared.Chat = None,
    options: shared.TaskOptions = None,
    sparse_adapter: shared.SparseAdapter = None,
    device: shared.Device = None,
    dtype: shared.Dtype = None,
    residual: shared.Residual = None,
    kv_dtype: shared.KVDtype = None,
    kv_memory: shared.KVMemory = None,
    max_rows: shared.MaxRows = 512,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Output file; by default calibration.json, verified.json, vetoed.json or leaderboard.json.",
        ),
    ] = None,
    statistics: Annotated[
        Path | None,
        typer.Option(
            help="Statistics of the model's queries, which triattention needs: read if the file exists, else measured "
            "on dense answers and written."
        ),
    ] = None,
    verify: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure this schedule or policy (rkv:512+128) on its own rollouts, on other prompts (repeatable)."
        ),
    ] = None,
    leaderboard: Annotated[
        bool,
        typer.Option(
            "--leaderboard",
            help="Compare methods at equal bytes held and at equal bytes read: those of --budgets tokens, by default a "
            "quarter and a half of the length.",
        ),
    ] = False,
    timing: Annotated[
        bool | None,
        typer.Option(
            "--timing/--no-timing",
            help="With --leaderboard, time a decode step of every policy; by default on a GPU. Turn it off on a GPU "
            "that other programs use.",
        ),
    ] = None,
    vetoed: Annotated[
        float | None,
        typer.Option(
            help="Find each method's smallest budget with confidently less than this share of vetoed rollouts."
        ),
    ] = None,
) -> None:
    """Measure the tail of acceptance of sparse policies at every length; `alula plan` turns it into a schedule.

    --methods names what is measured, with settings after colons: `block-topk,rkv:buffer=64:sinks=4`. An & combines an
    evictor of fixed budget with a selector: `'rkv:budget=512&block-topk'`.

    An interrupted calibration continues where it stopped. The exit code is 1 if no policy was ever sparse.

    With --verify nothing is searched: each schedule or policy generates its own rollouts. The exit code is 1 if one
    of them fails: if some bin's tail is confidently below tau, if confidently more than 15 % of its rollouts have a
    token below 1e-4 times its sparse probability, or if no rollout exceeded the budget. With --vetoed, budgets are
    measured in the same way, and the exit code is 1 if no method has one. With --leaderboard, methods are compared at
    equal bytes, each on its own rollouts and on the dense policy's text.
    """
    from alula.mismatch.calibrate.calibrate import Grid, TextSettings
    from alula.mismatch.measure import Bins
    from alula.models.geometry import Geometry
    from alula.sparsity.evict import needs_queries
    from alula.sparsity.family import parse_families

    check_numbers(length, bin_width, prompts, samples, temperature, tau or [], quantile, confidence)
    require(text in ("dense", "own"), f"--text {text}: write dense or own.")
    own = text == "own"
    given = {
        "--methods": methods is not None,
        "--budgets": budgets is not None,
        "--pages": pages != PAGES,
        "--bin": bin_width is not None,
        "--tau": bool(tau),
        "--sweep": sweep,
        "--no-forward": not forward,
        "--text own": own,
        "--quantile": quantile != QUANTILE,
        "--confidence": confidence != CONFIDENCE,
        "--timing": timing is True,
        "--no-timing": timing is False,
    }
    modes = {"--verify": bool(verify), "--vetoed": vetoed is not None, "--leaderboard": leaderboard}
    mode = check_options(
        [mode for mode, asked in modes.items() if asked], [name for name, asked in given.items() if asked]
    )

    # what the mode measures, checked before anything is loaded
    width = bin_width or min(2000, -(-length // 8))
    bins = Bins(width, -(-length // width), quantile, confidence)
    page_sizes, allowed = parse_numbers("pages", pages), parse_numbers("budgets", budgets) if budgets else None
    families = parse_families(methods or "block-topk", page_sizes)
    measured = [family.template for family in families]
    run: Callable[..., int]
    if verify:
        from alula.cli.verify import run_verify
        from alula.mismatch.calibrate.verify import parse_target

        policies = [(name, *parse_target(name, width, length, kv_dtype)) for name in verify]
        require(len(tau or []) < 2, f"--tau {' --tau '.join(map(str, tau or []))}: --verify takes one.")
        measured = [policy for _, _, policy in policies]
        limit = tau[0] if tau else None
        run = partial(run_verify, named=policies, tau=limit, quantile=quantile, confidence=confidence)
    elif vetoed is not None:
        from alula.cli.find_budget import ladders_of, run_find_budget

        ladders = ladders_of(families, allowed, length, vetoed, prompts)
        run = partial(run_find_budget, ladders=ladders, limit=vetoed, bins=bins, sweep=sweep)
    elif leaderboard:
        from alula.cli.leaderboard import run_leaderboard

        run = partial(
            run_leaderboard,
            families=families if methods else None,
            targets=allowed or (length // 4, length // 2),
            page=page_sizes[0],
            statistics=statistics,
            timing=timing is not False,
        )
    else:
        from alula.cli.tails import default_budgets, run_calibration

        grid = Grid(tuple(families), allowed or default_budgets(length), tuple(tau or ()), sweep, forward)
        run = partial(run_calibration, grid=grid, bins=bins)
        require(out is None or out.suffix != ".svg", f"--out {out}: the plot has this name; use another ending.")
    out = out or Path(OUTPUTS[mode])
    check_output_file(out)
    if statistics is not None and not statistics.exists():
        check_output_file(statistics, "--statistics")

    loaded, dataset = load_model_and_prompts(
        model, data, split, data_dir, prompt, chat, options, device, dtype, residual, seed
    )
    if methods or not leaderboard:  # the leaderboard of all methods leaves out what would be dense
        check_dense_layers(measured, Geometry.of(loaded.model).layers)
    dataset = short_enough(dataset, length, prompts)
    engines = Engines(loaded, length, kv_dtype, kv_memory, max_rows, sparse_adapter)
    other_prompts = bool(verify) or vetoed is not None
    chosen = choose_prompts(dataset, prompts, seed, from_end=other_prompts)
    source = TextSettings(chosen, length, samples, temperature, seed + other_prompts, own)
    if not leaderboard and (statistics or any(map(needs_queries, measured))):  # a leaderboard has a text to measure on
        engines.measure_queries(statistics, partial(dense_answers, text=source))
    if verify:
        warn_overlap(len(dataset), prompts)
    raise typer.Exit(run(engines, source, out=out, progress=sys.stderr.isatty()))


TIMING, SEARCH = ("--timing", "--no-timing"), ("--no-forward", "--text own")
UNUSED = {
    "--verify": ("--methods", "--budgets", "--pages", "--sweep", *SEARCH, *TIMING),
    "--vetoed": ("--tau", *SEARCH, *TIMING),
    "--leaderboard": ("--bin", "--tau", "--sweep", *SEARCH, "--quantile", "--confidence"),
    "a calibration": TIMING,
}
"""What a mode of `alula calibrate` has no use for."""
OUTPUTS = {
    "--verify": "verified.json",
    "--vetoed": "vetoed.json",
    "--leaderboard": "leaderboard.json",
    "a calibration": "calibration.json",
}


def check_options(modes: "Sequence[str]", given: "Sequence[str]") -> str:
    """The mode. Raises for two at once, and for options that the mode would ignore."""
    require(len(modes) < 2, f"{' '.join(modes)}: these are different measurements; ask for one at a time.")
    mode = modes[0] if modes else "a calibration"
    for option in given:
        require(option not in UNUSED[mode], f"{option}: {mode} does not use it; drop it.")
    return mode


def dense_answers(engine: "Engine", text: "TextSettings") -> list[list[int]]:
    """The first prompts with the dense policy's answers."""
    from alula.engine.measure_queries import dense_text

    return dense_text(partial(engine.generate, progress=False), text.prompts, text.sampling)


def check_numbers(
    length: int,
    bin_width: int | None,
    prompts: int,
    samples: int,
    temperature: float,
    taus: list[float],
    quantile: float,
    confidence: float,
) -> None:
    from alula.mismatch.tail import MIN_PROMPTS

    require(length >= 1, f"--length {length}: must be at least 1.")
    require(bin_width is None or bin_width >= 1, f"--bin {bin_width}: must be at least 1.")
    require(
        prompts >= MIN_PROMPTS, f"--prompts {prompts}: a tail needs at least {MIN_PROMPTS} to be trusted; use more."
    )
    require(samples >= 1, f"--samples {samples}: must be at least 1.")
    require(temperature > 0, f"--temperature {temperature}: must be above 0.")
    for tau in taus:
        require(0 < tau < 1, f"--tau {tau}: must be between 0 and 1, since it is a probability of acceptance.")
    for name, share in (("quantile", quantile), ("confidence", confidence)):
        require(0 < share < 1, f"--{name} {share}: must be between 0 and 1, since it is a share.")


def check_dense_layers(policies: "Sequence[Sparsity]", layers: int) -> None:
    """Raise for a selector that no layer would use."""
    for select in (policy.select for policy in policies if policy.select):
        require(
            select.dense_layers < layers,
            f"dense_layers={select.dense_layers}: covers all layers of the model ({layers}), so {select.method} would "
            "select nothing; lower it.",
        )


def short_enough(dataset: "Dataset", length: int, count: int) -> "Dataset":
    """The prompts of at most half the length; raises if there are fewer than `count`."""
    most = max(length // 2, 1)
    kept = tuple(example for example in dataset if len(example.prompt_ids or ()) <= most)
    require(
        len(kept) >= count,
        f"--prompts {count}: only {len(kept)} of the {len(dataset)} prompts have at most {most} tokens, half of "
        "--length; raise it, use fewer prompts, or more data.",
    )
    return replace(dataset, examples=kept)


def choose_prompts(dataset: "Dataset", count: int, seed: int, from_end: bool = False) -> tuple[tuple[int, ...], ...]:
    """`count` prompts of a seeded order: the first ones, or the last ones to check on other prompts."""
    order = dataset.take(None, seed)
    chosen = order[-count:] if from_end else order[:count]
    return tuple(example.prompt_ids for example in chosen)


def warn_overlap(available: int, prompts: int) -> None:
    if available < 2 * prompts:
        typer.echo(
            f"note: {2 * prompts - available} of the {prompts} prompts may also have been calibrated on; "
            "use more data to check on fresh ones only."
        )


def parse_numbers(name: str, text: str) -> tuple[int, ...]:
    from alula.sparsity.text import tokens

    try:
        return tuple(dict.fromkeys(tokens(word.strip()) for word in text.split(",")))
    except ValueError:
        raise SettingError(f"--{name} {text!r}: write token counts separated by commas, as in 512,1k.") from None
