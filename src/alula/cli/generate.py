"""`alula generate`: rollouts as JSON lines."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from alula.cli import options as shared
from alula.cli.common import check_output_file, warn_other_model
from alula.cpus import set_threads
from alula.errors import SettingError

if TYPE_CHECKING:
    from alula.engine.rollout import Rollout


def generate(
    model: shared.Model,
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; without any, --file is read.")] = None,
    file: Annotated[
        Path | None, typer.Option(help='JSONL with a "prompt" (text, chat messages or token ids) per line; - is stdin.')
    ] = None,
    sparsity: shared.Sparsity = "dense",
    n: Annotated[int, typer.Option(help="Rollouts per prompt.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum tokens per rollout.")] = 256,
    min_new_tokens: Annotated[int, typer.Option(help="Minimum tokens before a stop token.")] = 0,
    temperature: shared.Temperature = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; below 1 no log-probs are returned.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Top-k sampling; above 0 no log-probs are returned.")] = 0,
    stop: shared.Stop = None,
    seed: shared.Seed = 0,
    topk_logprobs: Annotated[int, typer.Option(help="Also write this many most likely tokens per position.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Ignore the end-of-sequence token.")] = False,
    chat: shared.Chat = None,
    device: shared.Device = None,
    dtype: shared.Dtype = None,
    residual: shared.Residual = None,
    kv_dtype: shared.KVDtype = None,
    kv_memory: shared.KVMemory = None,
    max_rows: shared.MaxRows = 256,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="JSONL file; by default standard output.")] = None,
) -> None:
    """Generate with a model, dense or under any sparsity; one JSON object per rollout."""
    inputs: list[Any] = list(prompts or []) + (read_prompts(file) if file else [])
    if not inputs:
        raise SettingError("no prompts: pass them as arguments or with --file.")
    check_output_file(out)
    from alula.engine.engine import Engine
    from alula.engine.rollout import Sampling
    from alula.sparsity.policy import Sparsity

    policy = Sparsity.parse(sparsity)
    sampling = Sampling(
        n=n,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        topk_logprobs=topk_logprobs,
    )
    engine = Engine.load(
        model,
        device=device,
        dtype=dtype,
        residual=residual,
        page=policy.page(),
        kv_dtype=kv_dtype,
        kv_memory=kv_memory,
        max_rows=max_rows,
    )
    set_threads(engine.model)
    warn_other_model([policy], engine)
    if chat is not False and getattr(engine.tokenizer, "chat_template", None):
        inputs = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in inputs]
    rollouts = engine.generate(inputs, sampling, policy)
    lines = (json.dumps(as_record(r), ensure_ascii=False) for r in rollouts)
    if out is not None:
        out.write_text("".join(line + "\n" for line in lines))
    else:
        for line in lines:
            typer.echo(line)


def read_prompts(file: Path) -> list[Any]:
    if str(file) != "-" and (not file.exists() or file.is_dir()):  # a pipe, as of <(command), is read too
        raise SettingError(f"--file {file}: {'is a folder' if file.is_dir() else 'no such file'}.")
    if str(file) != "-":
        with file.open(encoding="utf-8", errors="surrogateescape") as lines:
            return parse_prompts(lines, file)
    try:
        return parse_prompts(sys.stdin, file)
    except UnicodeDecodeError:
        raise SettingError("--file -: standard input is not UTF-8; convert it.") from None


def parse_prompts(lines: Iterable[str], file: Path) -> list[Any]:
    from alula.data.sources import numbered

    prompts = []
    for number, line in numbered(lines, f"--file {file}"):
        if line.strip():
            try:
                prompts.append(json.loads(line)["prompt"])
            except (json.JSONDecodeError, KeyError, TypeError):
                raise SettingError(
                    f'--file {file}, line {number}: not a JSON object such as {{"prompt": "text"}}.'
                ) from None
    return prompts


def as_record(r: "Rollout") -> dict[str, Any]:
    record: dict[str, Any] = {
        "prompt_index": r.prompt_index,
        "sample_index": r.sample_index,
        "text": r.text,
        "finish": r.finish,
        "prompt_ids": r.prompt_ids,
        "token_ids": r.token_ids,
        "logprobs": None if r.logprobs is None else [round(x, 6) for x in r.logprobs.tolist()],
        "kv": vars(r.kv) | {"saved": r.kv.saved},
        "sparsity": r.sparsity.describe(),
    }
    if r.topk_ids is not None and r.topk_logprobs is not None:
        record |= {"topk_ids": r.topk_ids.tolist(), "topk_logprobs": r.topk_logprobs.tolist()}
    return record
