"""`alula eval`: accuracy on data sets, dense or under any sparsity."""

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from alula.cli import options as shared
from alula.cli.common import check_output_file, shared_page, task_options, warn_other_model
from alula.cpus import set_threads
from alula.errors import RunFailed, SettingError, require
from alula.files import write_atomically

if TYPE_CHECKING:
    from alula.data import Dataset
    from alula.engine.engine import Engine
    from alula.engine.rollout import Sampling
    from alula.evals import EvalResult
    from alula.evals.suites import Entry
    from alula.sparsity.policy import Sparsity


def evaluate(
    models: Annotated[list[str], typer.Argument(help="Hub ids, folders or GGUF files; several are compared.")],
    data: Annotated[
        list[str] | None, typer.Option(help="gsm8k, math500, ..., task:NAME, JSONL or Parquet file; repeatable.")
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            help="Benchmarks of a paper with its samples and settings: sparse-rl, sparrow-math or sparrow-code. Other "
            "options replace its values."
        ),
    ] = None,
    sparsity: shared.Sparsities = None,
    k: Annotated[int | None, typer.Option(help="Answers per problem; by default 1.")] = None,
    limit: Annotated[int | None, typer.Option(help="Maximum problems per data set.")] = None,
    options: shared.TaskOptions = None,
    reward: Annotated[
        str | None,
        typer.Option(
            help="Reward that grades the answers: math, code, task:NAME, package.module:function. By default math, "
            "code for coding benchmarks, or the task's."
        ),
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Maximum tokens per answer; by default 2048.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; by default 0, which is greedy.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Top-k sampling.")] = None,
    stop: shared.Stop = None,
    seed: shared.Seed = 0,
    data_dir: shared.DataDir = None,
    split: shared.Split = None,
    prompt: shared.PromptTemplate = None,
    chat: shared.Chat = None,
    sparse_adapter: shared.SparseAdapter = None,
    device: shared.Device = None,
    dtype: shared.Dtype = None,
    residual: shared.Residual = None,
    kv_dtype: shared.KVDtype = None,
    kv_memory: shared.KVMemory = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write all results to this JSON file.")] = None,
) -> None:
    """Evaluate models on data sets: pass@1, avg@k, maj@k, response length and KV use, as one table."""
    require(k is None or k >= 1, f"--k {k}: must be at least 1.")
    require(limit is None or limit >= 1, f"--limit {limit}: must be at least 1.")
    policies, page = check_policies(sparsity or ["dense"], sparse_adapter)
    given = {"k": k, "max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    entries = list_entries(data or [], suite, {name: value for name, value in given.items() if value is not None})
    import torch

    from alula.data import load
    from alula.data.load import settings_per_source
    from alula.engine.engine import Engine
    from alula.engine.rollout import Sampling

    settings = {"split": split, "data_dir": data_dir, "prompt": prompt, "options": task_options(options)}
    work = [
        (
            load(entry.data, size=limit, seed=seed, **own),
            Sampling(
                n=entry.k,
                max_new_tokens=entry.max_new_tokens,
                temperature=entry.temperature,
                top_p=entry.top_p,
                top_k=entry.top_k,
                seed=seed,
                stop=tuple(stop or ()),
            ),
            reward or default_reward(entry.data),
        )
        for entry, own in zip(entries, settings_per_source([entry.data for entry in entries], settings))
    ]
    check_output_file(out)
    results: list[EvalResult] = []
    for model in models:
        engine = Engine.load(
            model,
            device=device,
            dtype=dtype,
            residual=residual,
            kv_dtype=kv_dtype,
            kv_memory=kv_memory,
            page=page,
            sparse_adapter=sparse_adapter,
        )
        set_threads(engine.model)
        warn_other_model(policies, engine)
        for dataset, sampling, name in work:
            for policy in policies:
                results.append(evaluate_one(model, engine, dataset, policy, sampling, name, chat))
                typer.echo(f"{model}, {dataset.name}, {policy.describe()}: {results[-1].accuracy:.1%}", err=True)
                if out is not None:  # after each evaluation, so that nothing is lost
                    write_atomically(out, json.dumps([r.to_dict() for r in results], indent=1) + "\n")
                report_failures(results[-1], name)
        engine.sleep()  # frees its memory for the next one
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    print_results(results)


def report_failures(result: "EvalResult", reward: str) -> None:
    """Say which answers could not be graded; raise if none could."""
    if not result.failures:
        return
    count, answers = sum(result.failures.values()), result.problems * result.k
    most = max(result.failures, key=lambda reason: result.failures[reason])
    if count >= answers:
        raise RunFailed(
            f"the reward {reward} failed on every one of the {answers} answers, most often with "
            f"{most.removeprefix(f'{reward}: ')!r}; correct it."
        )
    typer.echo(
        f"{result.data}: {count} of {answers} answers could not be graded and count 0, most often: {most}", err=True
    )


def list_entries(data: list[str], suite: str | None, given: dict[str, Any]) -> "list[Entry]":
    """What to evaluate: the data sets, or those of a suite, with the options that were given."""
    from alula.evals.suites import Entry
    from alula.evals.suites import suite as find_suite

    if bool(data) == (suite is not None):
        raise SettingError("give either --data or --suite; `--data gsm8k` evaluates one data set.")
    entries = [replace(entry, **given) for entry in (find_suite(suite) if suite else map(Entry, data))]
    for entry in entries:
        if entry.k > 1 and entry.temperature == 0:
            raise SettingError(f"k={entry.k} with temperature=0: greedy answers are all the same; set --temperature.")
    return entries


def default_reward(source: str) -> str:
    from alula.data.benchmarks import BENCHMARKS

    if source.startswith(("task:", "reasoning-gym:")):
        return source
    return BENCHMARKS[source].reward if source in BENCHMARKS else "math"


def check_policies(texts: list[str], sparse_adapter: Path | None) -> "tuple[list[Sparsity], int]":
    """The policies, and the page size that they share."""
    from alula.sparsity.policy import Sparsity

    policies = [Sparsity.parse(text) for text in texts]
    page = shared_page(policies)
    if sparse_adapter is not None and all(policy.dense for policy in policies):
        raise SettingError(
            f"--sparse-adapter {sparse_adapter}: every policy is dense, and only sparse ones use the adapter; name "
            "one with --sparsity."
        )
    return policies, page


def print_results(results: "list[EvalResult]") -> None:
    from rich.console import Console

    from alula.evals import markdown, table

    console = Console()
    if console.is_terminal:
        console.print(table(results))
    else:
        typer.echo(markdown(results))


def evaluate_one(
    model: str,
    engine: "Engine",
    dataset: "Dataset",
    policy: "Sparsity",
    sampling: "Sampling",
    reward: str,
    chat: bool | None,
) -> "EvalResult":
    from alula.data import prepare
    from alula.data.answers import final_answer
    from alula.evals import evaluate as run
    from alula.rewards import Rewards, RewardTerm

    if engine.tokenizer is None:
        raise SettingError(f"model {model!r} has no tokenizer, which data sets of text need; use a model that has one.")
    prepared = prepare(dataset, engine.tokenizer, chat=chat)
    adapted = "" if policy.dense or engine.sparse_model is None else ", with its adapter"
    quantised = f", {engine.geometry.kv_dtype} KV" if engine.geometry.kv_dtype else ""
    with Rewards([RewardTerm(name=reward)]) as rewards:
        return run(
            lambda prompts, n: engine.generate(prompts, sampling, policy),
            prepared,
            rewards,
            sampling.n,
            answer_of=None if reward == "code" else final_answer,
            model=model,
            sparsity=policy.describe() + adapted + quantised,
        )
