"""Prompts with checkable answers: where they come from, how they are put to a model, in which order."""

from alula.data.dataset import Dataset, Example
from alula.data.load import load
from alula.data.prompts import prepare
from alula.data.stream import PromptStream

__all__ = ["Dataset", "Example", "PromptStream", "load", "prepare"]
