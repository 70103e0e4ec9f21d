"""Loads Hugging Face causal LMs: a hub id, a local folder, a GGUF file, or `shape:<name>` with random weights."""

import copy
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    modeling_gguf_pytorch_utils,
)

from alula.distributed import resolve_device
from alula.errors import SettingError, first_line, require
from alula.hub import offline_if_unreachable
from alula.models.residual import widen_like, widen_residual
from alula.models.shapes import shape
from alula.models.stop_tokens import stop_token_ids
from alula.models.supported import check_config, check_dry_run

SHAPE = "shape:"
UNREADABLE = (OSError, ValueError, struct.error)
"""Errors of reading a model's files; the last two also mean a truncated GGUF file."""
HEAD_PART = 4096
"""Rows of a 16-bit head that are converted to float32 at a time, on a CPU."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass
class LoadedModel:
    """A model in evaluation mode, with its tokenizer."""

    model: PreTrainedModel
    tokenizer: Any | None
    """None for `shape:<name>` and for a folder without one; prompts must be token ids then."""
    name: str
    eos_ids: tuple[int, ...]
    """Tokens that end an answer (`alula.models.stop_tokens`)."""


def load_model(
    source: str | os.PathLike[str],
    *,
    device: str | torch.device | None = "cpu",
    dtype: str | torch.dtype | None = None,
    seed: int = 0,
    residual: str | None = None,
) -> LoadedModel:
    """Load weights from safetensors or GGUF (remote code is never run), or draw random ones for `shape:<name>`.

    `dtype` defaults to float32 on the CPU and bfloat16 on CUDA. The model is *built* in it: casting a finished model
    would also round RoPE's frequencies, which must stay float32. `residual="float32"` keeps the residual stream of a
    16-bit model in float32 (`alula.models.residual`).
    """
    require(
        residual in (None, "float32"),
        f"residual={residual}: must be float32, or left out for the dtype of the weights.",
    )
    source, device = os.fspath(source), resolve_device(device)
    dtype = _dtype(dtype, device)
    if source.startswith(SHAPE):
        model, tokenizer = _random_model(source.removeprefix(SHAPE), device, dtype, seed), None
    else:
        model, tokenizer = _pretrained(source, dtype)
        model = model.to(device=device)  # type: ignore[call-arg]
    model.eval()
    learn_padding(model)
    check_dry_run(model, share_weights(model))
    if residual is not None:
        widen_residual(model)
    eos_ids = stop_token_ids(model.generation_config, model.config, tokenizer=tokenizer)
    return LoadedModel(model, tokenizer, short_name(source), eos_ids)


def learn_padding(model: PreTrainedModel) -> None:
    """Let gradients reach the embedding of the pad token. Sequences are packed, so one that occurs is a token as any
    other: chat templates often end a turn with it."""
    embeddings: Any = model.get_input_embeddings()
    embeddings.padding_idx = None


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A second model with the same parameter objects and its own config.

    transformers stores the attention implementation in the config, so the engine and the learner need one each. Tied
    weights stay tied, buffers (RoPE's frequencies) are copied, and a float32 residual stream is kept.
    """
    with torch.device("meta"):
        twin = type(model)(copy.deepcopy(model.config))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        _set_module_attribute(twin, name, parameter)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        _set_module_attribute(twin, name, buffer.clone())
    twin.generation_config = copy.deepcopy(model.generation_config)
    learn_padding(twin)
    widen_like(model, twin)
    return twin.train(model.training)


def lm_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Float32 logits `[..., vocabulary]` from `hidden [..., width]` and the head `weight [vocabulary, width]`.

    Logits rounded to bfloat16 are 0.125 apart between 16 and 32, which changes log-probs more than sparsity does. On
    CUDA the product of 16-bit matrices is accumulated and returned in float32, at the same speed. On a CPU a 16-bit
    head is converted in parts, which stay in the processor's cache.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    if rows.is_cuda and rows.dtype in (torch.bfloat16, torch.float16):
        logits = _WideProduct.apply(rows, weight)
    else:
        parts = [weight] if weight.dtype == torch.float32 else weight.split(HEAD_PART)
        products = [rows.float() @ part.float().T for part in parts]
        logits = products[0] if len(products) == 1 else torch.cat(products, -1)
    if bias is not None:
        logits = logits + bias.float()
    return logits.view(*hidden.shape[:-1], weight.shape[0])


class _WideProduct(torch.autograd.Function):
    """`rows @ weight.T` of 16-bit matrices with a float32 result; the gradients are 16-bit products."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return torch.mm(rows, weight.T, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        rows, weight = ctx.saved_tensors
        gradient = gradient.to(rows.dtype)
        wants_rows, wants_weight = ctx.needs_input_grad
        return (gradient @ weight if wants_rows else None, gradient.T @ rows if wants_weight else None)


def find_pretrained(source: str) -> dict[str, Any]:
    """`from_pretrained` arguments for a model source. A local path that holds no model raises."""
    path = Path(source).expanduser()
    is_gguf = path.suffix == ".gguf"
    looks_local = is_gguf or path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1
    require(
        path.exists() or not looks_local,
        f"model {source!r}: no such file or folder; give a hub id, a folder, a .gguf file or {SHAPE}<name>.",
    )
    require(
        is_gguf or not path.is_file(),
        f"model {source!r}: a single file must be .gguf; for safetensors give the folder with its config.json.",
    )
    if is_gguf:
        missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
        require(
            not missing,
            f"model {source!r}: GGUF files need {' and '.join(missing)}; install with `pip install 'alula[gguf]'`.",
        )
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    for file, hint in (
        ("*.safetensors", "Alula reads safetensors and GGUF only"),
        ("config.json", "name the folder of a whole model"),
    ):
        if (run / "model").is_dir():
            hint = f"a run's model is in {run / 'model'}"
        require(
            not path.is_dir() or any(path.glob(file)),
            f"model {source!r}: the folder has no {file.removeprefix('*')} file; {hint}.",
        )
    if not path.is_dir():
        offline_if_unreachable()
    return {"pretrained_model_name_or_path": str(path) if path.is_dir() else source}


def _pretrained(source: str, dtype: torch.dtype) -> tuple[PreTrainedModel, Any | None]:
    location = find_pretrained(source) | {"trust_remote_code": False}
    path, is_gguf = Path(source).expanduser(), "gguf_file" in location
    with nullcontext() if sys.stderr.isatty() else no_progress_bars():
        try:
            config = AutoConfig.from_pretrained(**location)
            check_config(config)
            # Otherwise a GGUF file stays quantized if a kernel for it is installed.
            dense = {"quantization_config": transformers.GgufConfig(dequantize=True)} if is_gguf else {}
            load: Any = AutoModelForCausalLM.from_pretrained  # its type annotation lacks the second result
            model, info = load(
                config=config,
                dtype=dtype,
                use_safetensors=None if is_gguf else True,
                ignore_mismatched_sizes=True,  # reported below, by name
                output_loading_info=True,
                **dense,
                **location,
            )
            has_tokenizer = not path.is_dir() or any((path / name).exists() for name in TOKENIZER_FILES)
            tokenizer = AutoTokenizer.from_pretrained(**location) if has_tokenizer else None
            if is_gguf:
                _fix_gguf_tokenizer(tokenizer, config)
        except SettingError:
            raise
        except ImportError as error:
            raise SettingError(f"model {source!r} needs a package: {first_line(error)}.") from error
        except (*UNREADABLE, SafetensorError) as error:
            raise SettingError(f"model {source!r} cannot be loaded: {load_failure(error, source)}") from error
    # transformers would continue with random values for these weights
    absent = sorted([*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])])
    require(
        not absent,
        f"model {source!r}: {len(absent)} weights of {type(model).__name__} are missing in its files or have another "
        f"shape ({', '.join(absent[:2])}{', ...' * (len(absent) > 2)}); give a complete causal language model.",
    )
    return model, tokenizer


def _fix_gguf_tokenizer(tokenizer: Any, config: PreTrainedConfig) -> None:
    """Work around transformers 5.17, which guesses a GGUF tokenizer's end token and drops spaces when decoding BPE.

    The config was read from the file's metadata and names the correct tokens.
    """
    for role in ("bos", "eos", "pad"):
        token_id = getattr(config, f"{role}_token_id", None)
        if isinstance(token_id, int):
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token_id))
    tokenizer.clean_up_tokenization_spaces = False


def _random_model(name: str, device: torch.device, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Random weights: matrices and biases normal with the config's std (0.02 in published shapes), norms 1.

    They are drawn directly on `device`: no copy on the host, no second initialisation.
    """
    settings = copy.deepcopy(shape(name))
    config: PreTrainedConfig = AutoConfig.for_model(settings.pop("model_type"), **settings, dtype=dtype)
    check_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator(device).manual_seed(seed)
    drawn: dict[int, nn.Parameter] = {}
    for path, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in drawn:
            value = torch.empty_like(parameter, device=device)
            if parameter.dim() > 1 or path.endswith("bias"):
                value.normal_(0.0, config.initializer_range, generator=generator)
            else:
                value.fill_(1.0)
            drawn[id(parameter)] = nn.Parameter(value)
        _set_module_attribute(model, path, drawn[id(parameter)])
    _rebuild_rotary(model, device)
    return model


def _rebuild_rotary(model: PreTrainedModel, device: torch.device) -> None:
    """Build the RoPE modules again: their float32 frequencies are not computed on the meta device."""
    for path, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            with torch.device(device):
                _set_module_attribute(model, path, type(module)(model.config))


def _set_module_attribute(model: nn.Module, path: str, value: Any) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, value)


def _dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    require(
        resolved in (torch.float32, torch.bfloat16, torch.float16),
        f"dtype={dtype}: must be float32, bfloat16 or float16.",
    )
    return resolved  # type: ignore[return-value]


def short_name(source: str) -> str:
    """The display name of the model at `source`."""
    return source if source.startswith(SHAPE) else Path(source).name or source


def load_failure(error: Exception, source: str) -> str:
    """Why a model's files cannot be read, as one sentence."""
    reason = first_line(error)
    truncated = isinstance(error, SafetensorError)
    if source.endswith(".gguf"):
        truncated = not isinstance(error, OSError) and "magic" not in reason
    return f"{reason}; the file is probably incomplete, so fetch it again." if truncated else f"{reason}."


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Turn transformers' progress bars off."""
    logging = transformers.utils.logging
    if not logging.is_progress_bar_enabled():
        yield
        return
    # This tqdm ignores transformers' progress-bar switch.
    gguf_bar, modeling_gguf_pytorch_utils.tqdm = modeling_gguf_pytorch_utils.tqdm, logging.tqdm
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
        modeling_gguf_pytorch_utils.tqdm = gguf_bar
