"""`alula eval`: accuracy on data sets, dense or under any sparsity."""

import gc
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from alula.cli import options as shared
from alula.cli.common import check_output_file, warn_other_model
from alula.errors import SettingError

if TYPE_CHECKING:
    from alula.data import Dataset
    from alula.engine.engine import Engine
    from alula.engine.rollout import Sampling
    from alula.evals import EvalResult
    from alula.sparsity.policy import Sparsity


def evaluate(
    models: Annotated[list[str], typer.Argument(help="Hub ids, folders or GGUF files; several are compared.")],
    data: Annotated[list[str], typer.Option(help="gsm8k, math500, ..., task:NAME, JSONL or Parquet file; repeatable.")],
    sparsity: shared.Sparsities = None,
    k: Annotated[int, typer.Option(help="Answers per problem.")] = 1,
    limit: Annotated[int | None, typer.Option(help="Maximum problems per data set.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Option of a generated task, such as symbols=4; repeatable."),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(help="Reward that grades the answers; by default math, or the task's."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum tokens per answer.")] = 2048,
    temperature: shared.Temperature = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0,
    seed: shared.Seed = 0,
    data_dir: shared.DataDir = None,
    split: shared.Split = None,
    prompt: shared.PromptTemplate = None,
    chat: shared.Chat = None,
    sparse_adapter: Annotated[Path | None, typer.Option(help="DistillSparse adapter, for sparse policies.")] = None,
    device: shared.Device = None,
    dtype: shared.Dtype = None,
    residual: shared.Residual = None,
    kv_memory: shared.KVMemory = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write all results to this JSON file.")] = None,
) -> None:
    """Evaluate models on data sets: pass@1, avg@k, maj@k, response length and KV use, as one table."""
    policies, page = check_policies(sparsity or ["dense"], sparse_adapter)
    if k > 1 and temperature == 0:
        raise SettingError(f"k={k} with temperature=0: greedy answers are all the same; set --temperature.")
    import torch

    from alula.data import load
    from alula.engine.engine import Engine
    from alula.engine.rollout import Sampling

    options = dict(parse_option(text) for text in option or [])
    datasets = [
        load(source, split=split, data_dir=data_dir, prompt=prompt, size=limit, seed=seed, options=options)
        for source in data
    ]
    sampling = Sampling(n=k, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    check_output_file(out)
    results: list[EvalResult] = []
    for model in models:
        engine = Engine.load(
            model,
            device=device,
            dtype=dtype,
            residual=residual,
            kv_memory=kv_memory,
            page=page,
            sparse_adapter=sparse_adapter,
        )
        warn_other_model(policies, engine)
        for source, dataset in zip(data, datasets):
            for policy in policies:
                name = reward or (source if source.startswith(("task:", "reasoning-gym:")) else "math")
                results.append(evaluate_one(model, engine, dataset, policy, sampling, name, chat))
                typer.echo(f"{model}, {dataset.name}, {policy.describe()}: {results[-1].accuracy:.1%}", err=True)
                if out is not None:  # after each evaluation, so that nothing is lost
                    out.write_text(json.dumps([r.to_dict() for r in results], indent=1) + "\n")
        engine.sleep()  # frees its memory for the next one
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    print_results(results)


def check_policies(texts: list[str], sparse_adapter: Path | None) -> "tuple[list[Sparsity], int]":
    """The policies, and the page size that they share."""
    from alula.sparsity.policy import Sparsity

    policies = [Sparsity.parse(text) for text in texts]
    pages = {policy.select.block for policy in policies if policy.select}
    if len(pages) > 1:
        raise SettingError(f"--sparsity: block sizes {sorted(pages)} need different page sizes; use one call each.")
    if sparse_adapter is not None and all(policy.dense for policy in policies):
        raise SettingError(
            f"--sparse-adapter {sparse_adapter}: every policy is dense, and only sparse ones use the adapter; name "
            "one with --sparsity."
        )
    return policies, next(iter(pages), 16)


def print_results(results: "list[EvalResult]") -> None:
    from rich.console import Console

    from alula.evals import markdown, table

    console = Console()
    if console.is_terminal:
        console.print(table(results))
    else:
        typer.echo(markdown(results))


def parse_option(text: str) -> tuple[str, Any]:
    from alula.config.load import parse_yaml

    name, equals, value = text.partition("=")
    if not equals or not name:
        raise SettingError(f"--option {text!r}: write name=value.")
    return name, parse_yaml(value, f"--option {text!r}")


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
    from alula.evals import evaluate as run
    from alula.rewards import Rewards, RewardTerm

    if engine.tokenizer is None:
        raise SettingError(f"model {model!r} has no tokenizer, which data sets of text need; use a model that has one.")
    prepared = prepare(dataset, engine.tokenizer, chat=chat)
    adapted = "" if policy.dense or engine.sparse_model is None else ", with its adapter"
    with Rewards([RewardTerm(name=reward)]) as rewards:
        return run(
            lambda prompts, n: engine.generate(prompts, sampling, policy),
            prepared,
            rewards,
            sampling.n,
            model=model,
            sparsity=policy.describe() + adapted,
        )
