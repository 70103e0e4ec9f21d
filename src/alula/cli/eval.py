"""`alula eval`: accuracy on data sets, dense or under any sparsity."""

import gc
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from alula.errors import SettingError

if TYPE_CHECKING:
    from alula.data import Dataset
    from alula.engine.engine import Engine
    from alula.engine.rollout import Sampling
    from alula.evals import EvalResult
    from alula.sparsity.policy import Sparsity


def evaluate(
    models: Annotated[list[str], typer.Argument(help="Hub ids, folders or GGUF files; several are compared.")],
    data: Annotated[list[str], typer.Option(help="gsm8k, math500, ..., task:NAME, a JSONL or Parquet file; repeat.")],
    sparsity: Annotated[list[str] | None, typer.Option(help="dense, rkv:512+128, block-topk:1024; repeat.")] = None,
    k: Annotated[int, typer.Option(help="Answers per problem.")] = 1,
    limit: Annotated[int | None, typer.Option(help="Only this many problems of each data set.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Of a generated task, such as symbols=4; repeat.")
    ] = None,
    reward: Annotated[
        str | None, typer.Option(help="What says that an answer is right; by default math, or the task's own.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens per answer.")] = 2048,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the most likely tokens of this mass.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of sampling and of generated tasks.")] = 0,
    data_dir: Annotated[Path | None, typer.Option(help="Where the benchmarks lie on disk, a folder each.")] = None,
    split: Annotated[str | None, typer.Option(help="Of a Hugging Face data set.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Template of the prompt, with {field}s of the row.")] = None,
    chat: Annotated[bool | None, typer.Option(help="Use the chat template; by default where there is one.")] = None,
    sparse_adapter: Annotated[Path | None, typer.Option(help="DistillSparse's adapter, for sparse policies.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; by default bfloat16 on CUDA, else float32.")
    ] = None,
    residual: Annotated[
        str | None, typer.Option(help="float32 keeps the residual stream of a 16-bit model in float32.")
    ] = None,
    kv_memory: Annotated[str | None, typer.Option(help="Size of the KV pool, such as 20GiB.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write all results here, as JSON.")] = None,
) -> None:
    """Evaluate models on data sets: pass@1, avg@k, maj@k, response length and KV use, as one table."""
    from alula.sparsity.text import parse_sparsity

    if k > 1 and temperature == 0:
        raise SettingError(f"k={k} with temperature=0: greedy answers are all the same; set --temperature.")
    policies = [parse_sparsity(text) for text in sparsity or ["dense"]]
    pages = {policy.select.block for policy in policies if policy.select}
    if len(pages) > 1:
        raise SettingError(f"--sparsity: block sizes {sorted(pages)} need different page sizes; use one call each.")
    if sparse_adapter is not None and all(policy.dense for policy in policies):
        raise SettingError(
            f"--sparse-adapter {sparse_adapter}: every policy is dense, and it is for sparse ones; name "
            "one with --sparsity."
        )
    import torch

    from alula.cli.generate import check_out, note_other_model
    from alula.data import load
    from alula.engine.engine import Engine
    from alula.engine.rollout import Sampling

    options = dict(parse_option(text) for text in option or [])
    sets = [
        load(source, split=split, data_dir=data_dir, prompt=prompt, size=limit, seed=seed, options=options)
        for source in data
    ]
    sampling = Sampling(n=k, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    check_out(out)
    results: list[EvalResult] = []
    for model in models:
        engine = Engine.load(
            model,
            device=device,
            dtype=dtype,
            residual=residual,
            kv_memory=kv_memory,
            page=next(iter(pages), 16),
            sparse_adapter=sparse_adapter,
        )
        note_other_model(policies, engine)
        for source, dataset in zip(data, sets):
            for policy in policies:
                name = reward or (source if source.startswith(("task:", "reasoning-gym:")) else "math")
                results.append(one(model, engine, dataset, policy, sampling, name, chat))
                typer.echo(f"{model}, {dataset.name}, {policy.describe()}: {results[-1].accuracy:.1%}", err=True)
                if out is not None:  # after each, so that nothing is lost
                    out.write_text(json.dumps([r.to_dict() for r in results], indent=1) + "\n")
        engine.sleep()  # its memory goes to the next one
        del engine
        gc.collect()
        torch.cuda.empty_cache()
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


def one(
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
