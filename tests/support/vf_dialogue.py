"""A taskset and a harness for `verifiers`: a dialogue of three turns, held by a program in this process.

The harnesses that come with `verifiers` start their programs with uv, which fetches packages from the network.
"""

import openai
import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.utils.decorators import reward

__all__ = ["DialogueHarness", "DialogueTaskset"]

QUESTIONS = ("Hello?", "And then?", "What else?")


class DialogueTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @reward
    async def length(self, trace: vf.Trace) -> float:
        """The sampled tokens of all turns."""
        return float(sum(sum(node.mask) for node in trace.nodes))


class DialogueTaskset(vf.Taskset[DialogueTask, vf.TasksetConfig]):
    def load(self):
        yield DialogueTask(vf.TaskData(prompt=QUESTIONS[0]), vf.TaskConfig())


class DialogueHarness(vf.Harness[HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: ModelContext, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ) -> vf.ProgramResult:
        messages = []
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for question in QUESTIONS:
                messages.append({"role": "user", "content": question})
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        return vf.ProgramResult(0, "", "")
