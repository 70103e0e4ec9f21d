"""Evaluation: accuracy, answer lengths and KV use."""

from alula.evals.evaluate import evaluate
from alula.evals.result import EvalResult
from alula.evals.table import markdown, table

__all__ = ["EvalResult", "evaluate", "markdown", "table"]
