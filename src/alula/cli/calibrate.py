"""`alula calibrate`: how far sparse policies are from the dense one, by length, as a file and a plot."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from alula.errors import SettingError, require

if TYPE_CHECKING:
    from alula.data import Dataset
    from alula.engine.engine import Engine
    from alula.mismatch.calibrate.file import Calibration
    from alula.models.load import LoadedModel


def calibrate(
    model: Annotated[str, typer.Argument(help="Hub id, Hugging Face folder, GGUF file or shape:<name>.")],
    data: Annotated[str, typer.Option(help="Prompts: a file, folder, benchmark, hub id or task:<name>.")],
    methods: Annotated[
        str,
        typer.Option(
            help="Selectors and evictors, METHOD[:setting=value...], separated by commas; EVICTOR:budget=N&SELECTOR "
            "puts an evictor of one budget beside a selector."
        ),
    ] = "block-topk",
    budgets: Annotated[
        str | None, typer.Option(help="KV tokens, separated by commas; by default Sparrow's grid below the length.")
    ] = None,
    pages: Annotated[str, typer.Option(help="Block sizes of selectors, separated by commas.")] = "16",
    length: Annotated[int, typer.Option(help="Longest sequence, prompt included.")] = 4096,
    prompts: Annotated[int, typer.Option(help="How many prompts.")] = 64,
    samples: Annotated[int, typer.Option(help="Rollouts per prompt.")] = 1,
    bin_width: Annotated[
        int | None, typer.Option("--bin", help="Tokens per length bin; by default 2000, or an eighth of the length.")
    ] = None,
    tau: Annotated[
        list[float] | None, typer.Option(help="Threshold to search for (repeatable); by default dense floor - 0.085.")
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Measure every budget instead of searching.")] = False,
    forward: Annotated[bool, typer.Option(help="Build growing schedules for evictors, bin by bin.")] = True,
    quantile: Annotated[float, typer.Option(help="Which quantile of acceptance is the tail.")] = 0.05,
    confidence: Annotated[float, typer.Option(help="Of the bands, over all bins together.")] = 0.95,
    temperature: Annotated[float, typer.Option(help="Of the text and of the policies.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the choice of prompts and of the text.")] = 0,
    split: Annotated[str | None, typer.Option(help="Which part of a stored data set.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with local copies of the benchmarks.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Template of the prompt, with {field}s of the row.")] = None,
    chat: Annotated[bool | None, typer.Option(help="Use the chat template; by default where there is one.")] = None,
    options: Annotated[str, typer.Option(help="Options of a task, as YAML: '{symbols: 8}'.")] = "{}",
    adapter: Annotated[
        Path | None, typer.Option(help="Folder of the sparse policy's own LoRA (DistillSparse).")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default CUDA where there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    residual: Annotated[
        str | None, typer.Option(help="float32 keeps the residual stream of a 16-bit model in float32.")
    ] = None,
    kv_memory: Annotated[str | None, typer.Option(help="Size of the KV pool, such as 60GiB.")] = None,
    max_rows: Annotated[int, typer.Option(help="Sequences that decode together.")] = 512,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("calibration.json"),
    verify: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure this schedule or policy (rkv:512+128) on rollouts of its own, on other prompts (repeatable)."
        ),
    ] = None,
    vetoed: Annotated[
        float | None,
        typer.Option(
            help="Find each method's smallest budget with confidently less than this share of vetoed rollouts."
        ),
    ] = None,
) -> None:
    """Measure the tail of acceptance of sparse policies at every length; `alula plan` makes a schedule of it.

    A calibration that was interrupted goes on where it was. With --verify nothing is searched: each schedule or policy
    generates its own rollouts, and the exit code is 1 if for one of them some bin's tail is confidently below tau,
    confidently more than 15 % of the rollouts hold a token that the dense policy would not have sampled, or no
    rollout outgrew the budget, so that nothing was tested. With --vetoed budgets are measured in the same way, and
    the exit code is 1 if no method has one.
    """
    import sys

    from alula.cli.generate import check_out
    from alula.mismatch.calibrate.calibrate import Grid, Text
    from alula.mismatch.calibrate.families import parse_methods
    from alula.mismatch.calibrate.verify import named
    from alula.mismatch.measure import Bins

    check_numbers(length, bin_width, tau or [])
    width = bin_width or min(2000, -(-length // 8))
    verified = [(name, *named(name, width, length)) for name in verify or []]  # a misspelt one is refused at once
    require(not verified or len(tau or []) < 2, f"--tau {' --tau '.join(map(str, tau or []))}: --verify takes one.")
    ladders = []
    if vetoed is not None:
        from alula.cli.find_budget import ladders_of

        require(not verified and not tau, "--vetoed looks for a budget by vetoed rollouts; drop --verify and --tau.")
        families = parse_methods(methods, numbers("pages", pages))
        ladders = ladders_of(families, numbers("budgets", budgets) if budgets else None, length, vetoed, prompts)
    if out == Path("calibration.json") and (verified or ladders):
        out = Path("verified.json" if verified else "vetoed.json")  # not over what a schedule was planned from
    check_out(out)
    loaded, dataset = load(
        model, data, split, data_dir, prompt, chat, options, device, dtype, residual, seed, max(length // 2, 1)
    )
    engines = Engines(loaded, length, kv_memory, max_rows, adapter)
    progress = sys.stderr.isatty()
    bins = Bins(width, -(-length // width), quantile, confidence)
    if verified or vetoed is not None:
        text = Text(choose(dataset, prompts, seed, from_end=True), length, samples, temperature, seed + 1)
        if vetoed is not None:
            from alula.cli.find_budget import run_vetoed

            raise typer.Exit(run_vetoed(engines, text, ladders, vetoed, bins, sweep, out, progress))
        from alula.cli.verify import run_verify

        if len(dataset) < 2 * prompts:
            typer.echo(
                f"note: {2 * prompts - len(dataset)} of the {prompts} prompts may also have been calibrated on; "
                "use more data to check on fresh ones only."
            )
        asked = tau[0] if tau else None
        raise typer.Exit(run_verify(engines, text, verified, asked, quantile, confidence, out, progress))
    from alula.mismatch.calibrate.calibrate import calibrate as measure_all

    text = Text(choose(dataset, prompts, seed), length, samples, temperature, seed)
    grid = Grid(
        tuple(parse_methods(methods, numbers("pages", pages))),
        numbers("budgets", budgets) if budgets else default_budgets(length),
        tuple(tau or ()),
        sweep,
        forward,
    )
    found = measure_all(
        engines.with_page, text, grid, bins, out.with_suffix(".work.json"), say=typer.echo, progress=progress
    )
    write(found, out)


def check_numbers(length: int, bin_width: int | None, taus: list[float]) -> None:
    require(length >= 1, f"--length {length}: must be at least 1.")
    require(bin_width is None or bin_width >= 1, f"--bin {bin_width}: must be at least 1.")
    for tau in taus:
        require(0 < tau < 1, f"--tau {tau}: must lie between 0 and 1, as a probability of acceptance.")


def load(
    model: str,
    data: str,
    split: str | None,
    data_dir: Path | None,
    prompt: str | None,
    chat: bool | None,
    options: str,
    device: str | None,
    dtype: str | None,
    residual: str | None,
    seed: int,
    longest: int | None = None,
) -> "tuple[LoadedModel, Dataset]":
    """The model with a tokenizer (a bare shape takes a task's), and the prompts of at most `longest` tokens."""

    from alula.config.load import parse_yaml
    from alula.data import load as load_data
    from alula.data import prepare
    from alula.models.load import SHAPE, load_model
    from alula.trainer.build import TASK, named_tokenizer, with_tokenizer

    chosen = parse_yaml(options, f"--options {options!r}") or {}
    require(isinstance(chosen, dict), f"options={options!r}: write a YAML mapping, such as '{{symbols: 8}}'.")
    found = load_data(data, split=split, data_dir=data_dir, prompt=prompt, answer="", seed=seed, options=chosen)
    loaded = load_model(model, device=device, dtype=dtype, seed=seed, residual=residual)
    if loaded.tokenizer is None and data.startswith(TASK):
        loaded = with_tokenizer(loaded, named_tokenizer(data, chosen), cut=model.startswith(SHAPE))
    require(loaded.tokenizer is not None, f"model {model!r} has no tokenizer to read the prompts with.")
    return loaded, prepare(found, loaded.tokenizer, chat=chat, max_prompt_tokens=longest)


def choose(dataset: "Dataset", count: int, seed: int, from_end: bool = False) -> tuple[tuple[int, ...], ...]:
    """`count` prompts in an order made by `seed`: the first of it, or the last for a check on other prompts."""
    require(len(dataset) >= count, f"prompts={count}: the data has only {len(dataset)} that fit; ask for fewer.")
    order = dataset.take(None, seed)
    chosen = order[-count:] if from_end else order[:count]
    return tuple(example.prompt_ids for example in chosen)


class Engines:
    """One engine at a time, made anew for another page size."""

    def __init__(
        self, loaded: "LoadedModel", length: int, kv_memory: str | None, max_rows: int, adapter: Path | None
    ) -> None:
        self.loaded, self.length, self.kv_memory, self.max_rows = loaded, length, kv_memory, max_rows
        self.adapter = adapter
        self.engine: Engine | None = None

    def with_page(self, page: int) -> "Engine":
        from alula.engine.engine import Engine

        if self.engine is None or self.engine.page != page:
            if self.engine is not None:
                self.engine.sleep()  # its memory goes to the next one
            self.engine = Engine(
                self.loaded,
                page=page,
                kv_memory=self.kv_memory,
                max_rows=self.max_rows,
                max_length=self.length + page,
                sparse_adapter=self.adapter,
            )
        return self.engine


def numbers(name: str, text: str) -> tuple[int, ...]:
    from alula.sparsity.text import tokens

    try:
        return tuple(tokens(word.strip()) for word in text.split(","))
    except ValueError:
        raise SettingError(f"{name}={text!r}: write numbers of tokens separated by commas, as in 512,1k.") from None


def default_budgets(length: int) -> tuple[int, ...]:
    from alula.mismatch.control.control import PAGES

    found = tuple(16 * pages for pages in PAGES if 16 * pages < length)
    require(len(found) >= 2, f"budgets: name them; Sparrow's grid starts at 512, too much for a length of {length}.")
    return found


def write(found: "Calibration", out: Path) -> None:
    from alula.mismatch.plan.plot import plot_tails

    found.save(out)
    plot = out.with_suffix(".svg")
    plot.write_text(plot_tails(found))
    lines = [
        "| configuration | budget | tail | worst trusted bin | its lower bound | KV saved | KV not read | evictions |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in (m for family in found.families().values() for m in family):
        trusted = [bin_ for bin_ in one.tail if bin_.enough]
        worst = min(trusted, key=lambda bin_: bin_.value)
        setting = one.configuration
        kv = "| |" if one.kv is None else f"{one.kv.saved:.1%} | {one.kv.not_read:.1%} | {one.kv.evictions}"
        lines.append(
            f"| {setting.describe()} | {setting.budget} | {one.tail.overall:.4f} | {worst.value:.4f} "
            f"| {worst.lower:.4f} | {kv} |"
        )
    for grown in found.forward:
        lines.append(
            f"| {grown.configuration.describe()} | {', '.join(map(str, grown.budgets))} | growing, "
            f"tau {grown.tau:.4f} | | | | | |"
        )
    typer.echo("\n".join([*lines, *never_sparse(found)]))
    typer.echo(f"{out} and {plot}: dense floor {found.floor.overall:.4f}; make a schedule with `alula plan {out}`.")


def never_sparse(found: "Calibration") -> list[str]:
    """A sentence for every family with budgets that measured nothing: their tails are the dense policy's."""
    said = []
    for family in found.families().values():
        dense = [(m.configuration, m.kv) for m in family if m.kv is not None and m.kv.sparse == 0]
        if dense:
            budgets = ", ".join(str(setting.budget) for setting, _ in dense)
            (setting, kv), *_ = dense
            said.append(kv.never_sparse(f"{setting.describe()} with budget {budgets}", setting.sparsity()))
    return said
