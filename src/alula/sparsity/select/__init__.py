"""Selectors: which pages of the KV cache a decode step reads. One file per method."""

from alula.sparsity.select.base import Selector
from alula.sparsity.select.block_topk import BlockTopK
from alula.sparsity.select.quest import Quest

__all__ = ["METHODS", "Selector"]

METHODS: dict[str, Selector] = {"block-topk": BlockTopK(), "quest": Quest()}
