"""Packed attention inside any Hugging Face decoder, through transformers' AttentionInterface.

The sequence boundaries travel as keyword arguments of the model's `forward` down to the attention function.
transformers builds no mask for a name without a mask function, and packed sequences need none.
"""

import copy
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from alula.errors import SettingError
from alula.ops.packed_attention import packed_attention

NAME = "alula-packed"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scaling: float,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """The AttentionInterface signature: heads before tokens in, tokens before heads out, a batch of one."""
    if dropout:
        raise SettingError(
            f"attention_dropout={dropout}: the policy that is trained must be the one that was scored; "
            "set it to 0 in the model's configuration."
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return packed_attention(q, k, v, cu_seqlens, max_seqlen, scaling, sliding_window)[None], None


AttentionInterface.register(NAME, attend)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switch a model to packed attention.

    The setting lives on the config object, which a copy of the model would share: it gets its own first.
    """
    shared, config = model.config, copy.deepcopy(model.config)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = config  # type: ignore[assignment]
    model.set_attn_implementation(NAME)
