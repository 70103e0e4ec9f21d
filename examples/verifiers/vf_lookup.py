"""A taskset and environment of the `verifiers` package: task:lookup, with the table on verifiers' side."""

import verifiers.v1 as vf

from alula.data.tasks import build
from alula.environments.lookup import Lookup


class LookupData(vf.TaskData):
    answer: str
    table: dict[str, str]


class LookupTask(vf.Task[LookupData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def answered(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.split()[:1] == [self.data.answer])


class LookupConfig(vf.TasksetConfig):
    hops: int = 2


class LookupEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, runtime={"type": "subprocess"}, max_turns=4)


class LookupEnv(vf.Env[LookupEnvConfig]):
    async def run(self, task, agents):
        table = Lookup()
        table.reset({"table": task.data.table, "answer": task.data.answer, "prompt": ""}, 0)
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                messages, _, done = table.step(segment.last_reply)
                if done:
                    break
                segment = await interaction.turn(messages)


class LookupTaskset(vf.Taskset[LookupTask, LookupConfig]):
    def load(self):
        for example in build("lookup", hops=self.config.hops).dataset(8):
            data = LookupData(prompt=example.prompt, answer=example.answer, table=example.fields["table"])
            yield LookupTask(data, self.config.task)


__all__ = ["LookupEnv", "LookupTaskset"]
