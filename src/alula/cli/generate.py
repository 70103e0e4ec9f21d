"""`alula generate`: rollouts as JSON lines."""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from alula.errors import SettingError

if TYPE_CHECKING:
    from alula.engine.engine import Engine
    from alula.engine.rollout import Rollout
    from alula.sparsity.policy import Sparsity


def generate(
    model: Annotated[str, typer.Argument(help="Hub id, Hugging Face folder, GGUF file, or shape:NAME.")],
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; none reads --file.")] = None,
    file: Annotated[
        Path | None, typer.Option(help='JSONL with a "prompt" (text, chat messages or token ids) per line; - is stdin.')
    ] = None,
    sparsity: Annotated[str, typer.Option(help="dense, rkv:512+128, block-topk:1024, ...")] = "dense",
    n: Annotated[int, typer.Option(help="Rollouts per prompt.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens per rollout.")] = 256,
    min_new_tokens: Annotated[int, typer.Option(help="No stop token before this many.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="For evaluation: no log-probs are returned below 1.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="For evaluation: no log-probs are returned above 0.")] = 0,
    seed: Annotated[int, typer.Option(help="Everything random depends on it.")] = 0,
    topk_logprobs: Annotated[int, typer.Option(help="Also write this many most likely tokens per position.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-sequence token.")] = False,
    chat: Annotated[
        bool, typer.Option(help="Wrap text prompts as a user's message, where the model has a template.")
    ] = True,
    device: Annotated[str, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; by default bfloat16 on CUDA, else float32.")
    ] = None,
    residual: Annotated[
        str | None, typer.Option(help="float32 keeps the residual stream of a 16-bit model in float32.")
    ] = None,
    kv_memory: Annotated[str | None, typer.Option(help="Size of the KV pool, such as 20GiB.")] = None,
    max_rows: Annotated[int, typer.Option(help="Sequences that decode together.")] = 256,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="JSONL file; by default standard output.")] = None,
) -> None:
    """Generate with a model, densely or under any sparsity; one JSON object per rollout."""
    asked: list[Any] = list(prompts or []) + (read_prompts(file) if file else [])
    if not asked:
        raise SettingError("no prompts: give them as arguments or with --file.")
    check_out(out)
    from alula.engine.engine import Engine
    from alula.engine.rollout import Sampling
    from alula.sparsity.text import parse_sparsity

    policy = parse_sparsity(sparsity)
    sampling = Sampling(
        n=n,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        ignore_eos=ignore_eos,
        topk_logprobs=topk_logprobs,
    )
    page = policy.select.block if policy.select else 16
    engine = Engine.load(
        model,
        device=device,
        dtype=dtype,
        residual=residual,
        page=page,
        kv_memory=kv_memory,
        max_rows=max_rows,
    )
    note_other_model([policy], engine)
    if chat and getattr(engine.tokenizer, "chat_template", None):
        asked = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in asked]
    rollouts = engine.generate(asked, sampling, policy)
    lines = (json.dumps(as_record(r), ensure_ascii=False) for r in rollouts)
    if out is not None:
        out.write_text("".join(line + "\n" for line in lines))
    else:
        for line in lines:
            typer.echo(line)


def note_other_model(policies: "Sequence[Sparsity]", engine: "Engine") -> None:
    """What a run tells as its event `other-model`, on standard error."""
    from alula.trainer.preflight import OTHER_MODEL_ADVICE, schedules_of_other_models

    for message in dict.fromkeys(schedules_of_other_models(policies, engine.model.config)):
        typer.echo(f"note: {message} {OTHER_MODEL_ADVICE}", err=True)


def check_out(out: Path | None) -> None:
    """Make its folder, and refuse what cannot be written, before the work and not after it."""
    if out is None:
        return
    new = not os.path.lexists(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if new or out.is_file() or out.is_dir():  # opening a pipe would wait for its reader
            out.open("a").close()
        if new:
            out.unlink()
    except OSError as error:
        raise SettingError(f"--out {out}: cannot be written ({error.strerror}); name another file.") from None


def read_prompts(file: Path) -> list[Any]:
    if str(file) != "-" and not file.is_file():
        raise SettingError(f"--file {file}: there is no such file.")
    if str(file) != "-":
        with file.open(encoding="utf-8", errors="surrogateescape") as lines:
            return parse_prompts(lines, file)
    try:
        return parse_prompts(sys.stdin, file)
    except UnicodeDecodeError:
        raise SettingError("--file -: standard input is not UTF-8; convert it.") from None


def parse_prompts(lines: Iterable[str], file: Path) -> list[Any]:
    from alula.data.sources import numbered

    found = []
    for number, line in numbered(lines, f"--file {file}"):
        if line.strip():
            try:
                found.append(json.loads(line)["prompt"])
            except (json.JSONDecodeError, KeyError, TypeError):
                raise SettingError(
                    f'--file {file}, line {number}: not a JSON object such as {{"prompt": "text"}}.'
                ) from None
    return found


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
