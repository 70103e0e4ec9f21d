"""A Hugging Face tokenizer for a generated task: one token per word."""

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from alula.data.dataset import Example
from alula.data.tasks.task import Task
from alula.errors import require

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"


def task_tokenizer(task: Task) -> PreTrainedTokenizerFast:
    """Ids 0 to 3 are <pad>, <bos>, <eos> and <unk>, then the task's words; a text starts with <bos>."""
    vocabulary = {word: i for i, word in enumerate([PAD, BOS, EOS, UNKNOWN, *task.words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def supervised_ids(
    tokenizer: PreTrainedTokenizerFast, example: Example, shortcut: bool = False
) -> tuple[list[int], list[int]]:
    """Tokens of (prompt, solution with <eos>) for supervised warm-up on the careful trace or on the shortcut."""
    require(isinstance(example.prompt, str), "supervised_ids: a generated task's prompt is plain text.")
    solution = tokenizer(example.fields["shortcut" if shortcut else "trace"], add_special_tokens=False)["input_ids"]
    return tokenizer(example.prompt)["input_ids"], [*solution, tokenizer.eos_token_id]
