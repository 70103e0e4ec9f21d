"""Synthetic run folders that look like real ones: dense, naive sparse that collapses, Sparse-RL."""

import math
import random
from pathlib import Path

import yaml

from alula.run.run_dir import MetricsWriter
from alula.trainer.health import HealthMonitor

PROMPT = "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many in all?"
RIGHT = "In May she sold 48 / 2 = 24 clips.\nTogether that is 48 + 24 = 72.\n\nThe answer is \\boxed{72}."
WRONG = "She sold 48 clips in April and 48 / 2 in May.\n48 * 2 = 96.\n\nThe answer is \\boxed{96}."
BROKEN = "In May she sold 24 24 24 24 24 24 24 24 <b>24</b> 24 24 24 24 24 24 24 24 24 24 24"


def write_run(folder: Path, kind: str, steps: int = 240, seed: int = 0, every: int = 20, close: bool = True) -> Path:
    """`kind` is dense, naive or sparse-rl."""
    noise, health = random.Random(f"{kind}{seed}"), HealthMonitor()
    sparse = kind != "dense"
    settings = {
        "model": "SmolLM2-135M-Instruct",
        "seed": seed,
        "train": {"steps": steps, "lr": 1e-6, "prompts": 64, "group": 8},
        "sparsity": {"evict": {"method": "rkv", "budget": 64, "buffer": 16}} if sparse else None,
        "correction": "sparse-rl" if kind == "sparse-rl" else "none",
    }
    writer = MetricsWriter(folder, settings=settings, total_steps=240)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    for step in range(steps + 1):
        done = step / 240
        broken = 1 / (1 + math.exp(-14 * (done - 0.55))) if kind == "naive" else 0.0
        learned = 1 - math.exp(-2.6 * done)
        good = (0.22 + 0.34 * learned * (0.96 if sparse else 1)) * (1 - 0.93 * broken)
        if step % every == 0:
            for policy in ("sparse", "dense") if sparse else ("dense",):
                accuracy = max(0.0, good * (0.9 if policy == "sparse" else 1) + noise.gauss(0, 0.012))
                row = {"accuracy": accuracy, "stderr": math.sqrt(accuracy * (1 - accuracy) / 500 + 1e-6)}
                writer.log_eval(step, "gsm8k", policy, n=500, length=210.0, **row)
                for warning in health.observe_eval("gsm8k", policy, **row):
                    writer.log_event(step, warning.kind, warning.message, warning.advice)
            writer.log_completions(step, completions(noise, good, broken))
        if step == 0:
            continue
        length = (190 + 60 * learned) * (1 + 0.2 * broken) * noise.lognormvariate(0, 0.035)
        rollout = (5.2 if not sparse else 3.1) * length / 200 * noise.lognormvariate(0, 0.03)
        parts = {"rollout": rollout, "reward": 0.2, "score": 0.7 if sparse else 0.65, "update": 2.4}
        mismatch = {
            "mismatch/veto_rate": max(0.0, 0.06 + 0.02 * math.exp(-4 * done) + 0.3 * broken + noise.gauss(0, 0.012)),
            "mismatch/veto_rate_token": (4e-4 + 4e-3 * broken) * noise.lognormvariate(0, 0.15),
            "mismatch/kl_k1": (0.006 + 0.1 * broken) * noise.lognormvariate(0, 0.2),
            "mismatch/kl_k3": (0.005 + 0.006 * math.exp(-5 * done) + 0.12 * broken) * noise.lognormvariate(0, 0.2),
            "mismatch/ess": 0.93 - 0.5 * broken + noise.gauss(0, 0.01),
            "mismatch/xi_p01": (0.62 - 0.5 * broken) * noise.lognormvariate(0, 0.05),
            "mismatch/xi_p99": (1.5 + 3 * broken) * noise.lognormvariate(0, 0.05),
            "mismatch/tail/0": 0.9 - 0.4 * broken + noise.gauss(0, 0.006),
            "mismatch/tail/128": 0.86 - 0.5 * broken + noise.gauss(0, 0.01),
        }
        metrics = {
            "reward/mean": max(0.0, good + noise.gauss(0, 0.025)),
            "reward/accuracy": max(0.0, good + noise.gauss(0, 0.025)),
            "response/length_mean": length,
            "response/truncated": min(1.0, max(0.0, 0.06 + 0.7 * broken + noise.gauss(0, 0.01))),
            "policy/entropy": (0.42 - 0.16 * learned + 0.9 * broken) * noise.lognormvariate(0, 0.05),
            "policy/clip_fraction": 5e-4 * noise.lognormvariate(0, 0.3),
            "policy/grad_norm": (0.35 + 2.5 * broken) * noise.lognormvariate(0, 0.25 + 0.6 * broken),
            "policy/kl_ref": 0.002 * step / 240 * noise.lognormvariate(0, 0.1),
            **(mismatch if sparse else {"mismatch/veto_rate": 0.0, "mismatch/kl_k3": 0.0}),
            "kv/tokens_mean": 78.0 if sparse else 205.0,
            "kv/saved": 0.56 + 0.08 * learned + noise.gauss(0, 0.006) if sparse else 0.0,
            "kv/bytes_peak": (1.1 if sparse else 2.9) * 2**30,
            "kv/bytes_saved": 1.8 * 2**30 if sparse else 0.0,
            **{f"time/{name}": value for name, value in parts.items()},
            "time/step": sum(parts.values()) + 0.15,
            "speed/tokens_per_s": 512 * length / rollout,
            "speed/mfu": 0.41 + noise.gauss(0, 0.004),
            "data/epoch": step / 117,
            "groups/no_signal": min(1.0, max(0.0, 0.3 + 0.5 * broken + noise.gauss(0, 0.03))),
        }
        if kind == "naive" and step == 150:
            metrics["policy/grad_norm"] = 60.0
        writer.log(step, metrics)
        for warning in health.observe(metrics):
            writer.log_event(step, warning.kind, warning.message, warning.advice)
    if close:
        writer.close()
    return folder


def completions(noise: random.Random, good: float, broken: float) -> list[dict]:
    rows = []
    for _ in range(6):
        if noise.random() < broken:
            rows.append({"completion": BROKEN, "reward": 0.0, "finish": "length", "vetoed": noise.random() < 0.5})
        else:
            right = noise.random() < good
            rows.append(
                {"completion": RIGHT if right else WRONG, "reward": float(right), "finish": "stop", "vetoed": False}
            )
    return [{"prompt": PROMPT} | row for row in rows]
