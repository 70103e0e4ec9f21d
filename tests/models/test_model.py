import json
import math
import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV2Config,
    Gemma2Config,
    GenerationConfig,
    GraniteConfig,
    JambaConfig,
    LlamaConfig,
    MistralConfig,
    OlmoConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    T5Config,
    modeling_gguf_pytorch_utils,
)

from alula.errors import SettingError
from alula.models.load import (
    LoadedModel,
    lm_logits,
    load_model,
    no_progress_bars,
    share_weights,
)
from alula.models.shapes import SHAPES
from alula.models.supported import check_config, check_dry_run, violations

SMALL = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 128,
    "pad_token_id": None,
}
PROMPT = torch.tensor([[5, 9, 17, 33, 2, 71]])


def llama3_inv_freq(theta: float, dim: int, factor: float, low: float, high: float, original: int) -> list[float]:
    """The formula of Llama 3.1's RoPE, by hand: long wavelengths are stretched, short ones kept."""
    frequencies = []
    for i in range(0, dim, 2):
        frequency = theta ** (-i / dim)
        wavelength = 2 * math.pi / frequency
        if wavelength > original / low:
            frequency /= factor
        elif wavelength > original / high:
            smooth = (original / wavelength - low) / (high - low)
            frequency = (1 - smooth) * frequency / factor + smooth * frequency
        frequencies.append(frequency)
    return frequencies


def inv_freq(model: nn.Module) -> torch.Tensor:
    buffers = [buffer for name, buffer in model.named_buffers() if name.endswith("rotary_emb.inv_freq")]
    assert len(buffers) == 1
    return buffers[0]


# Shapes


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("smollm2-135m", 0.1345),
        ("llama-3.2-1b", 1.2358),
        ("qwen2.5-1.5b", 1.5437),
        ("qwen2.5-3b", 3.0859),
        ("qwen2.5-7b", 7.6156),
        ("qwen3-0.6b", 0.5960),
        ("qwen3-1.7b", 1.7206),
        ("qwen3-4b", 4.0225),
        ("qwen3-8b", 8.1907),
        ("qwen3-14b", 14.7683),
    ],
)
def test_published_shapes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    settings = dict(SHAPES[name])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    check_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=1e-4)


def test_random_weights_depend_on_the_seed_alone(tiny: LoadedModel) -> None:
    again, other = load_model(tiny.name), load_model(tiny.name, seed=1)
    for (name, a), b, c in zip(
        tiny.model.named_parameters(), again.model.parameters(), other.model.parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        if name.endswith("norm.weight"):
            assert (a == 1).all(), name
        else:
            assert not torch.equal(a, c), name
            assert a.dim() == 1 or a.std().item() == pytest.approx(0.125, rel=0.1), name
    assert not tiny.model.training
    assert tiny.tokenizer is None
    assert tiny.eos_ids == (1,)


def test_tiny_models_run_and_their_text_depends_on_the_prompt(tiny: LoadedModel) -> None:
    assert sum(p.numel() for p in tiny.model.parameters()) < 130_000
    assert tiny.model.config.head_dim == 16
    with torch.no_grad():
        one = tiny.model(PROMPT).logits[0, -1]
        other = tiny.model(torch.cat([torch.tensor([[6]]), PROMPT[:, 1:]], dim=1)).logits[0, -1]
    assert (one - other).abs().max() > 0.01


def test_tied_heads_are_one_parameter() -> None:
    tied, untied = load_model("shape:tiny-llama").model, load_model("shape:tiny-mistral").model
    assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight
    assert untied.get_output_embeddings().weight is not untied.get_input_embeddings().weight


def test_rope_frequencies_stay_float32_in_bfloat16() -> None:
    model = load_model("shape:tiny-qwen3", dtype="bfloat16").model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    expected = torch.tensor([10_000.0 ** (-i / 16) for i in range(0, 16, 2)])
    assert inv_freq(model).dtype == torch.float32
    torch.testing.assert_close(inv_freq(model), expected, rtol=1e-6, atol=0)


# Files


@pytest.fixture
def llama3_folder(tmp_path: Path) -> Path:
    """A published model folder: bfloat16 safetensors, scaled RoPE, a list of end tokens."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(**SMALL, head_dim=64, rope_parameters=rope, tie_word_embeddings=True, eos_token_id=3)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=[3, 7])
    model.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_loads_in_the_given_dtype_with_exact_rope(llama3_folder: Path, dtype: str) -> None:
    loaded = load_model(llama3_folder, dtype=dtype)
    assert loaded.name == "llama"
    assert loaded.tokenizer is None
    assert loaded.eos_ids == (3, 7)
    assert {p.dtype for p in loaded.model.parameters()} == {getattr(torch, dtype)}
    assert loaded.model.get_output_embeddings().weight is loaded.model.get_input_embeddings().weight
    expected = llama3_inv_freq(500_000.0, 64, 32.0, 1.0, 4.0, 8192)
    assert inv_freq(loaded.model).dtype == torch.float32
    torch.testing.assert_close(inv_freq(loaded.model), torch.tensor(expected), rtol=1e-6, atol=0)


def test_pickled_weights_are_never_read(llama3_folder: Path) -> None:
    state = load_model(llama3_folder).model.state_dict()
    (llama3_folder / "model.safetensors").unlink()
    torch.save(state, llama3_folder / "pytorch_model.bin")
    with pytest.raises(SettingError, match=r"\.safetensors"):
        load_model(llama3_folder)


def test_code_in_a_model_folder_is_never_run(llama3_folder: Path) -> None:
    proof = llama3_folder / "ran"
    (llama3_folder / "evil.py").write_text(f"open({str(proof)!r}, 'w')\n")
    config = json.loads((llama3_folder / "config.json").read_text())
    config["model_type"] = "evil"
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (llama3_folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SettingError, match=re.escape(str(llama3_folder))):
        load_model(llama3_folder)
    assert not proof.exists()


def test_missing_weights_raise(llama3_folder: Path) -> None:
    path = llama3_folder / "model.safetensors"
    complete = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    for weights in (
        {k: v for k, v in complete.items() if k != name},
        complete | {name: complete[name][:5].clone()},
        {k: v for k, v in complete.items() if ".layers." not in k},
    ):
        save_file(weights, path, metadata={"format": "pt"})
        with pytest.raises(SettingError, match=r" [0-9]+ weights of LlamaForCausalLM") as error:
            load_model(llama3_folder)
        assert "\n" not in str(error.value)
    path.write_bytes(b"no weights at all" * 10)
    with pytest.raises(SettingError, match=re.escape(str(llama3_folder)) + ".*header"):
        load_model(llama3_folder)
    with pytest.raises(SettingError, match=r"model\.safetensors'.*\.gguf"):
        load_model(path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("shape:qwen3-1.7", "did you mean 'qwen3-1.7b'"),
        ("/no/such/folder", "model '/no/such/folder': "),
        ("missing.gguf", "model 'missing.gguf': "),
        ("nobody/nothing", "model 'nobody/nothing' "),
    ],
)
def test_invalid_source_raises_with_one_line(source: str, message: str) -> None:
    with pytest.raises(SettingError, match=message) as error:
        load_model(source)
    assert "\n" not in str(error.value)


def test_invalid_dtype_raises() -> None:
    with pytest.raises(SettingError, match="dtype=int8"):
        load_model("shape:tiny-llama", dtype="int8")


def test_invalid_device_raises() -> None:
    for device in ("tpu", "mps", "mta"):
        with pytest.raises(SettingError, match=f"device={device}:"):
            load_model("shape:tiny-llama", device=device)
    with pytest.raises(SettingError, match="device=cuda:99:"):
        load_model("shape:tiny-llama", device="cuda:99")


@pytest.mark.real
@pytest.mark.slow
def test_gguf_gives_a_plain_dense_model_and_a_tokenizer(smollm2_model: LoadedModel) -> None:
    model, tokenizer = smollm2_model.model, smollm2_model.tokenizer
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert {type(m) for n, m in model.named_modules() if n.endswith(("_proj", "lm_head"))} == {nn.Linear}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert getattr(model.config, "quantization_config", None) is None
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    expected = torch.tensor([100_000.0 ** (-i / 64) for i in range(0, 64, 2)])
    torch.testing.assert_close(inv_freq(model), expected, rtol=1e-6, atol=0)

    assert smollm2_model.eos_ids == (2,)
    assert tokenizer.eos_token == "<|im_end|>"
    sentence = "Don't stop , please ."
    assert tokenizer.decode(tokenizer(sentence)["input_ids"]) == sentence
    chat = [{"role": "user", "content": "What is 2+2?"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n")
    inputs = tokenizer(text, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "4" in tokenizer.decode(output)
    assert output[-1] in smollm2_model.eos_ids


@pytest.mark.real
@pytest.mark.slow
def test_gguf_weights_are_those_of_the_file(smollm2: Path, smollm2_model: LoadedModel) -> None:
    """A feed-forward matrix is stored as it is, in blocks of 32 with 4-bit codes q: w = scale * q + minimum."""
    from gguf import GGUFReader

    tensor = next(t for t in GGUFReader(smollm2).tensors if t.name == "blk.3.ffn_up.weight")
    assert tensor.tensor_type.name == "Q4_1"
    blocks = torch.from_numpy(tensor.data.copy()).reshape(1536, 576 // 32, 20)
    scale, minimum = blocks[..., :4].contiguous().view(torch.float16).float().split(1, dim=-1)
    codes = torch.cat([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], dim=-1)
    expected = (scale * codes + minimum).reshape(1536, 576)
    torch.testing.assert_close(smollm2_model.model.model.layers[3].mlp.up_proj.weight.data, expected)


# Supported and unsupported architectures


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(),
        LlamaConfig(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}),
        Qwen2Config(),
        Qwen3Config(),
        Qwen3MoeConfig(),
        OlmoConfig(),
        MistralConfig(sliding_window=None),
        GraniteConfig(logits_scaling=1.0),
    ],
    ids=lambda config: config.model_type,
)
def test_plain_decoders_are_accepted(config: LlamaConfig) -> None:
    assert list(violations(config)) == []


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONG = {"rope_type": "longrope", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
LONG |= {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MistralConfig(sliding_window=4096), r"Mistral: .*sliding_window=4096"),
        (Qwen2Config(use_sliding_window=True), r"Qwen2: .*sliding"),
        (Qwen3Config(use_sliding_window=True, max_window_layers=2), r"Qwen3: .*sliding_attention"),
        (Gemma2Config(), r"Gemma2: .*sliding_attention"),
        (Gemma2Config(layer_types=["full_attention"] * 26, sliding_window=None), r"final_logit_softcapping=30"),
        (GraniteConfig(logits_scaling=8.0), r"Granite: .*logits_scaling=8.0"),
        (CohereConfig(), r"Cohere: .*logit_scale=0.0625"),
        (LlamaConfig(rope_parameters=DYNAMIC), r"dynamic RoPE"),
        (LlamaConfig(rope_parameters=LONG), r"longrope RoPE"),
        (JambaConfig(), r"Jamba: "),
        (Qwen3NextConfig(), r"Qwen3Next: "),
        (T5Config(), r"T5: .*encoder-decoder"),
        (Qwen2VLConfig(), r"Qwen2VL: "),
        (LlamaConfig(quantization_config={"quant_method": "awq"}), r"quantized"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_unsupported_architectures_raise(config: LlamaConfig, reason: str) -> None:
    with pytest.raises(SettingError, match=reason):
        check_config(config)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MistralConfig(**SMALL), "layer 0 .*sliding_window"),
        (Gemma2Config(**SMALL, head_dim=16), "layer 0 .*sliding_window, softcap"),
        (GraniteConfig(**SMALL, logits_scaling=8.0), "logits"),
        (CohereConfig(**SMALL), "logits"),
        (DeepseekV2Config(**SMALL, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16), "different sizes"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_the_dry_run_rejects_them_without_the_config(config: LlamaConfig, reason: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(SettingError, match=reason):
        check_dry_run(model, share_weights(model))


@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig, OlmoConfig])
def test_the_dry_run_passes_plain_decoders_and_leaves_them_alone(config: type[LlamaConfig]) -> None:
    model = AutoModelForCausalLM.from_config(config(**SMALL)).eval()
    before = model.config._attn_implementation
    check_dry_run(model, share_weights(model))
    assert model.config._attn_implementation == before


# Sharing weights


def test_a_twin_has_the_same_parameters_and_another_config(tiny: LoadedModel) -> None:
    model, twin = tiny.model, share_weights(tiny.model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    theirs = dict(twin.named_parameters(remove_duplicate=False))
    assert parameters.keys() == theirs.keys()
    assert all(theirs[name] is parameter for name, parameter in parameters.items())
    assert len(list(twin.parameters())) == len(list(model.parameters()))
    with torch.no_grad():
        assert torch.equal(twin(PROMPT).logits, model(PROMPT).logits)
        twin.set_attn_implementation("eager")
        assert model.config._attn_implementation == "sdpa"
        assert model.model.layers[0].self_attn.config._attn_implementation == "sdpa"
        model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
        torch.testing.assert_close(twin(PROMPT).logits, model(PROMPT).logits, rtol=1e-5, atol=1e-5)


def test_a_twin_in_bfloat16_keeps_float32_rope() -> None:
    model = load_model("shape:tiny-llama", dtype=torch.bfloat16).model
    twin = share_weights(model)
    assert inv_freq(twin).dtype == torch.float32
    assert torch.equal(inv_freq(twin), inv_freq(model))
    assert inv_freq(twin).data_ptr() != inv_freq(model).data_ptr()
    assert not any(buffer.is_meta for buffer in twin.buffers())


def test_a_twin_leaves_frozen_parameters_frozen() -> None:
    model = load_model("shape:tiny-llama").model
    model.model.embed_tokens.weight.requires_grad_(False)
    twin = share_weights(model)
    assert not twin.model.embed_tokens.weight.requires_grad
    assert not model.model.embed_tokens.weight.requires_grad
    assert twin.model.norm.weight.requires_grad


# Logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_float32_and_exact(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 3, 8, generator=generator).to(dtype)
    weight, bias = torch.randn(5, 8, generator=generator).to(dtype), torch.randn(5, generator=generator).to(dtype)
    logits = lm_logits(hidden, weight, bias)
    assert logits.dtype == torch.float32
    for b in range(2):
        for t in range(3):
            for v in range(5):
                exact = math.fsum(h * w for h, w in zip(hidden[b, t].tolist(), weight[v].tolist(), strict=True))
                assert logits[b, t, v].item() == pytest.approx(exact + bias[v].item(), abs=1e-5)


@pytest.mark.gpu
def test_logits_on_cuda_match_float64_and_carry_gradients() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(33, 256, device="cuda", generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(1000, 256, device="cuda", generator=generator).bfloat16().requires_grad_()
    logits = lm_logits(hidden, weight)
    exact = hidden.double() @ weight.double().T
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, rtol=1e-4, atol=1e-3)
    pull = torch.randn(33, 1000, device="cuda", generator=generator).bfloat16()
    got = torch.autograd.grad((logits * pull).sum(), (hidden, weight))
    want = torch.autograd.grad((exact * pull).sum(), (hidden, weight))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.double(), b.double(), rtol=2e-2, atol=2e-1)


@pytest.mark.gpu
def test_a_real_shape_is_drawn_on_the_device() -> None:
    model = load_model("shape:llama-3.2-1b", device="cuda").model
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("cuda", torch.bfloat16)}
    expected = torch.tensor(llama3_inv_freq(500_000.0, 64, 32.0, 1.0, 4.0, 8192), device="cuda")
    torch.testing.assert_close(inv_freq(model), expected, rtol=1e-6, atol=0)


def test_no_progress_bar_in_a_pipe(llama3_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not sys.stderr.isatty()
    load_model(llama3_folder)
    assert capsys.readouterr().err == ""


def test_the_bar_of_gguf_conversion_is_silent_in_a_pipe_too(capsys: pytest.CaptureFixture[str]) -> None:
    """transformers creates this bar without checking its own switch."""
    for shown in (False, True):
        with nullcontext() if shown else no_progress_bars():
            assert list(modeling_gguf_pytorch_utils.tqdm(range(3), desc="tensors")) == [0, 1, 2]
        assert ("tensors" in capsys.readouterr().err) == shown


def test_the_pad_tokens_embedding_learns(tmp_path: Path) -> None:
    """transformers drops its gradient, but a packed sequence has no padding: the token is one of the text."""
    source = load_model("shape:tiny-llama").model
    source.config.pad_token_id = 0
    source.save_pretrained(tmp_path)
    norms = []
    for model in (loaded := load_model(tmp_path).model, share_weights(loaded), source):
        model.zero_grad()
        torch.log_softmax(model(input_ids=torch.tensor([[3, 0, 4, 5, 6]])).logits, -1)[0, -1, 4].backward()
        norms.append(model.get_input_embeddings().weight.grad[0].norm().item())
    assert loaded.config.pad_token_id == 0
    assert norms[0] == pytest.approx(norms[2], rel=1e-5)
    assert norms[1] == pytest.approx(norms[2], rel=1e-5)
