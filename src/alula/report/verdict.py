"""One sentence per run: did the dense policy learn, what was saved, and how does it compare with the dense run?"""

import math
from dataclasses import dataclass

from alula.files import plus_minus
from alula.report.runs import Run
from alula.report.summary import held_out, mean


@dataclass(frozen=True)
class Verdict:
    text: str
    tone: str = ""
    """good, bad or empty."""


def verdicts(runs: list[Run]) -> list[Verdict]:
    """A verdict for every run. Sparse runs are compared with the first dense one that was evaluated."""
    reference = next((run for run in runs if is_dense(run) and held_out(run, "dense")), None)
    return [verdict(run, reference) for run in runs]


def verdict(run: Run, reference: Run | None = None) -> Verdict:
    evals = held_out(run, "dense")
    if not evals:
        return Verdict("No held-out evaluation of the dense policy: reward alone does not show whether it learned.")
    if len(evals) == 1:
        return Verdict(f"Held-out accuracy of the dense policy {evals[0][0]:.1%}, evaluated once.")
    (first, first_error), (last, last_error) = evals[0], evals[-1]
    change, error = last - first, math.hypot(first_error, last_error)
    verb = "rose" if change > 2 * error else "fell" if change < -2 * error else "did not change measurably,"
    parts = [
        f"Held-out accuracy of the dense policy {verb} from {first:.1%} to {last:.1%} "
        f"({100 * change:+.1f}{plus_minus(error, unit='')} points)"
    ]
    if not is_dense(run):
        shares = (("of the KV saved", "kv/saved"), ("of rollouts vetoed", "mismatch/veto_rate"))
        parts += [f"{value:.0%} {what}" for what, name in shares if (value := mean(run, name)) is not None]
    text, tone = ", ".join(parts), {"rose": "good", "fell": "bad"}.get(verb, "")
    if reference is None or reference is run:
        return Verdict(f"{text}.", tone)
    dense, dense_error = held_out(reference, "dense")[-1]
    gap, error = last - dense, math.hypot(last_error, dense_error)
    interval = plus_minus(error, unit="")
    if abs(gap) <= 2 * error:
        return Verdict(f"{text}; level with {reference.name} ({100 * gap:+.1f}{interval} points).", tone)
    place = "below" if gap < 0 else "above"
    tone = "bad" if gap < 0 else tone
    return Verdict(f"{text}; {100 * abs(gap):.1f}{interval} points {place} {reference.name}.", tone)


def is_dense(run: Run) -> bool:
    """Whether the run's settings say that its rollouts keep and read all KV, in the model's dtype."""
    quantised = run.settings.get("engine.kv_dtype", "null") != "null"
    return bool(run.settings) and not (
        quantised or any(name.startswith(("sparsity.evict.", "sparsity.select.")) for name in run.settings)
    )
