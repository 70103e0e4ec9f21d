"""Alula against vLLM: `python benchmarks/vllm.py --out benchmarks/results/vllm-h200.json`, where vLLM is installed.

qwen3-1.7b's shape with random weights, bf16, sampling at temperature 1 with log-probs. Each engine runs in a process of
its own, in the same call, one for each size of the KV pool; a short call before each row compiles and captures. A row's
time is the best of `--repeat`. What an engine has measured is written as soon as it ends. Two engines may also be
measured apart (`--engine alula --out A`, `--engine vllm --out V`) and joined (`--join A V`).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER = str(Path(__file__).resolve().parent)
sys.path.insert(0, FOLDER)
from sections import arguments, record  # noqa: E402

sys.path[:] = [path for path in sys.path if path != FOLDER]  # `import vllm` must not find this file

MODEL = "qwen3-1.7b"
PAGE = 16


@dataclass(frozen=True)
class Row:
    batch: int
    prompt: int
    new: int
    kv_memory: str | None = None
    """Without one, each engine takes its default."""
    sparsity: str = "dense"

    def prompts(self, seed: int) -> list[list[int]]:
        return np.random.default_rng(seed).integers(0, 150_000, (self.batch, self.prompt)).tolist()


TIGHT = {"batch": 96, "prompt": 128, "new": 8192, "kv_memory": "16GiB"}
ROWS = {
    "decode": Row(256, 128, 1024),
    "mixed": Row(64, 1024, 256),
    "prompts": Row(64, 8192, 1),
    "long": Row(64, 8192, 256),
    "tight": Row(**TIGHT),
    "tight-rkv-2048": Row(**TIGHT, sparsity="rkv:2048+128"),
    "tight-rkv-512": Row(**TIGHT, sparsity="rkv:512+128"),
}
Generate = Callable[[list[list[int]], int], dict]
"""(prompts, new tokens) -> facts about the call."""


def measure(row: Row, generate: Generate, repeat: int) -> dict:
    generate(row.prompts(0)[: max(8, row.batch // 4)], min(row.new, 16))
    best: dict[str, Any] = {}
    for turn in range(repeat):
        prompts = row.prompts(1 + turn)
        start = time.perf_counter()
        facts = generate(prompts, row.new)
        seconds = time.perf_counter() - start
        if not best or seconds < best["seconds"]:
            best = {"seconds": seconds, "tokens_per_s": row.batch * row.new / seconds, "repeat": repeat, **facts}
    return best


def alula_engine(rows: list[Row]) -> Callable[[Row], Generate]:
    from alula import Engine, Sampling, Sparsity

    engine = Engine.load(
        f"shape:{MODEL}",
        device="cuda",
        kv_memory=rows[0].kv_memory,
        max_rows=max(row.batch for row in rows),
        max_length=max(row.prompt + row.new for row in rows),
    )

    def generate(sparsity: Any, prompts: list[list[int]], new: int) -> dict:
        rollouts = engine.generate(prompts, Sampling(max_new_tokens=new, ignore_eos=True), sparsity, progress=False)
        assert all(len(rollout) == new for rollout in rollouts)
        return {name: sum(getattr(r.kv, name) for r in rollouts) for name in ("swaps", "restarts")}

    return lambda row: partial(generate, Sparsity.parse(row.sparsity))


def vllm_engine(rows: list[Row]) -> Callable[[Row], Generate]:
    from vllm import LLM, SamplingParams

    from alula.engine.kv_cache import parse_bytes

    folder = tempfile.mkdtemp()
    token_bytes = write_config(Path(folder))
    options: dict[str, Any] = {}
    if rows[0].kv_memory:
        options["num_gpu_blocks_override"] = parse_bytes(rows[0].kv_memory) // (PAGE * token_bytes)
    llm = LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        block_size=PAGE,
        max_num_seqs=max(row.batch for row in rows),
        max_model_len=max(row.prompt + row.new for row in rows),
        enable_prefix_caching=False,
        **options,
    )

    def generate(prompts: list[list[int]], new: int) -> dict:
        sampling = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == new for output in outputs)
        return {}

    return lambda row: generate


def write_config(folder: Path) -> int:
    """Write the shape's config.json, all that vLLM needs for random weights; returns the bytes of a token's KV."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from alula.models.geometry import Geometry
    from alula.models.shapes import shape

    settings = dict(shape(MODEL))
    config = AutoConfig.for_model(settings.pop("model_type"), **settings, dtype="bfloat16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    return Geometry.of(model).kv_token_bytes


def serve(engine: str, names: list[str], repeat: int, out: Path) -> None:
    """Measure rows with one engine, in this process."""
    rows = [ROWS[name] for name in names]
    generate_of = {"alula": alula_engine, "vllm": vllm_engine}[engine](rows)
    results = {}
    for name, row in zip(names, rows):
        results[name] = measure(row, generate_of(row), repeat)
        out.write_text(json.dumps(results))


def compare(name: str, cache: dict[str, dict]) -> Iterator[dict]:
    """A row's results with both engines."""
    row = ROWS[name]
    for engine in ("alula", "vllm"):
        if name in cache.get(engine, {}):
            yield {"kind": "generate", "engine": engine, "model": MODEL, **asdict(row), **cache[engine][name]}


def run_engine(engine: str, names: list[str], repeat: int) -> dict[str, dict]:
    """Results of the rows by name, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        environment = os.environ | {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
        options = ["--only", ",".join(names), "--repeat", str(repeat), "--out", str(out)]
        done = subprocess.run([sys.executable, __file__, "--engine", engine, *options], env=environment)
        if done.returncode:
            print(f"{engine}: {', '.join(names)} failed with status {done.returncode}", file=sys.stderr)
        return json.loads(out.read_text()) if out.exists() else {}


def main() -> None:
    parser = arguments(ROWS, __doc__)
    parser.add_argument("--engine", choices=["alula", "vllm"], help="measure one engine only, in this process")
    parser.add_argument("--repeat", type=int, default=2, help="calls of which the best counts")
    parser.add_argument("--join", nargs=2, type=Path, metavar=("ALULA", "VLLM"), help="results of the engines apart")
    options = parser.parse_args()
    names = options.only.split(",")
    if options.engine:
        serve(options.engine, names, options.repeat, options.out)
        return
    if find_spec("vllm") is None:
        raise SystemExit("vLLM is not installed: install it beside Alula (`pip install vllm`) and run this again.")
    import vllm

    cache: dict[str, dict] = {"alula": {}, "vllm": {}}
    sections = {name: partial(compare, name, cache) for name in ROWS}
    if options.join:
        for engine, path in zip(cache, options.join):
            cache[engine] = json.loads(path.read_text())
        record(sections, options, {"vllm": vllm.__version__})
        return
    for memory in dict.fromkeys(ROWS[name].kv_memory for name in names):
        together = [name for name in names if ROWS[name].kv_memory == memory]
        for engine in cache:
            own = [name for name in together if engine == "alula" or ROWS[name].sparsity == "dense"]
            if own:
                cache[engine] |= run_engine(engine, own, options.repeat)
                record(sections, options, {"vllm": vllm.__version__})


if __name__ == "__main__":
    main()
