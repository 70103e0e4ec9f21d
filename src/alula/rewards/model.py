"""`model:<folder>`: a reward model, any Hugging Face sequence classifier."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from alula.data.dataset import prompt_text
from alula.data.load import is_path
from alula.errors import SettingError, require, unknown

if TYPE_CHECKING:
    from alula.rewards.scoring import Answers


def check_exists(folder: str) -> None:
    """Raise for a folder that does not exist, if the name can only be a path."""
    exists = os.path.isdir(os.path.expanduser(folder))
    require(exists or not is_path(folder), f"reward model:{folder}: no such folder; check the path, or give a hub id.")


class ModelReward:
    """The score of prompt and completion: the logit of a model with one label, else the probability of `label`.

    If the tokenizer has a chat template, the prompt is a user turn and the completion the assistant's. Texts longer
    than `max_tokens` are truncated at the beginning. Weights are read from safetensors only; remote code is never run.
    """

    def __init__(
        self,
        folder: str,
        /,
        *,
        label: str | int | None = None,
        batch_size: int = 16,
        max_tokens: int = 4096,
        device: str = "cpu",
        dtype: str = "float32",
    ) -> None:
        require(batch_size >= 1, f"reward model: batch_size={batch_size} must be at least 1.")
        check_exists(folder)
        folder = os.path.expanduser(folder)
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            model = AutoModelForSequenceClassification.from_pretrained(
                folder, trust_remote_code=False, use_safetensors=True, dtype=getattr(torch, dtype)
            )
        except (OSError, ValueError) as error:
            raise SettingError(f"reward model: {folder!r} cannot be loaded: {error}") from error
        self.model = model.to(device).eval()
        self.batch_size, self.device = batch_size, device
        self.label = self._label(label)
        self.tokenizer.padding_side = "right"  # BERT pools its first token, and positions are counted from there
        self.tokenizer.truncation_side = "left"
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        if self.model.config.pad_token_id is None:  # decoder classifiers use it to find the last token
            self.model.config.pad_token_id = self.tokenizer.pad_token_id
        limits = [max_tokens, self.tokenizer.model_max_length, self._positions()]
        self.max_tokens = min(limit for limit in limits if limit)

    def _label(self, label: str | int | None) -> int | None:
        count, ids = self.model.config.num_labels, self.model.config.label2id
        if count == 1:
            require(label is None, f"reward model: label={label!r}, but the model has only one; leave it out.")
            return None
        if label is None:
            raise SettingError(f"reward model: the model has {count} labels; choose one: label={sorted(ids)[0]!r}.")
        if isinstance(label, int):
            require(0 <= label < count, f"reward model: label={label}: the model has {count} labels.")
            return label
        if label not in ids:
            raise unknown("label", label, ids)
        return ids[label]

    def _positions(self) -> int | None:
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def text(self, completion: str, example: Mapping[str, Any]) -> str:
        prompt = example["prompt"]
        if self.tokenizer.chat_template is None:
            return prompt_text(prompt) + completion
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        turns.append({"role": "assistant", "content": completion})
        return str(self.tokenizer.apply_chat_template(turns, tokenize=False))

    @torch.inference_mode()
    def __call__(self, answers: "Answers") -> list[float]:
        texts = [self.text(c, e) for c, e in zip(answers.completions, answers.examples)]
        chat = self.tokenizer.chat_template is not None
        ids = self.tokenizer(texts, truncation=True, max_length=self.max_tokens, add_special_tokens=not chat)[
            "input_ids"
        ]
        by_length = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        scores = [0.0] * len(ids)
        for start in range(0, len(ids), self.batch_size):
            rows = by_length[start : start + self.batch_size]
            batch = self.tokenizer.pad({"input_ids": [ids[i] for i in rows]}, return_tensors="pt")
            logits = self.model(**batch.to(self.device)).logits.float()
            values = logits[:, 0] if self.label is None else logits.softmax(-1)[:, self.label]
            for i, value in zip(rows, values.tolist()):
                scores[i] = value
        return scores
