"""Evaluation: how often a model is right, how long its answers are, how much KV they took."""

from alula.evals.evaluate import evaluate
from alula.evals.result import EvalResult
from alula.evals.table import markdown, table

__all__ = ["EvalResult", "evaluate", "markdown", "table"]
