"""`verifiers`' training client and its single-agent environment against a real server."""

import asyncio
import math

import pytest
import verifiers.v1 as vf
from renderers import Qwen3RendererConfig
from verifiers.v1.clients import ModelContext

from alula import Sparsity
from served import byte_model, byte_tokenizer, served

QWEN = (
    "<|im_end|>", "<|im_start|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["dense", "rkv:48+16,window=4,sinks=2"])
def test_an_episode_of_several_turns(tmp_path, policy):
    """Every turn's token ids and log-probs arrive, and the server continues the rollout's cache."""
    tokenizer = byte_tokenizer(QWEN)
    tokenizer.save_pretrained(tmp_path)
    with served(byte_model(tokenizer=tokenizer), sparsity=Sparsity.parse(policy)) as (address, service):
        client = vf.TrainClientConfig(
            base_url=f"{address}/v1",
            api_key_var="NONE",
            renderer_model_name=str(tmp_path),
            renderer=Qwen3RendererConfig(enable_thinking=False, thinking_retention="all"),
        )
        config = vf.SingleAgentEnvConfig(
            taskset={"id": "vf_dialogue"},
            agent=vf.AgentConfig(harness={"id": "vf_dialogue"}, runtime=vf.SubprocessConfig()),
        )
        episode = asyncio.run(
            play(config, ModelContext("tiny", client, vf.Sampling(max_tokens=24, temperature=0.9, seed=1)))
        )
        (trace,) = episode.traces
        assert not trace.errors, trace.errors
        sampled = [node for node in trace.nodes if any(node.mask)]
        assert len(sampled) == 3
        assert service.metrics.sessions == {"new": 1, "continued": 2}
        assert service.metrics.generated_tokens == sum(sum(node.mask) for node in sampled) > 30
        for node in sampled:
            assert all(math.isfinite(value) and value < 0 for value in node.logprobs)
        assert trace.reward == service.metrics.generated_tokens


async def play(config: vf.SingleAgentEnvConfig, context: ModelContext) -> vf.Episode:
    env = vf.SingleAgentEnv(config)
    async with env.serving():
        (task,) = env.taskset
        return await env.run_episode(task, context)
