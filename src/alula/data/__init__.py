"""Data sets of prompts with reference answers: loading, chat templates and tokenization, training order."""

from alula.data.dataset import Dataset, Example
from alula.data.load import load
from alula.data.prompts import prepare
from alula.data.stream import PromptStream

__all__ = ["Dataset", "Example", "PromptStream", "load", "prepare"]
