"""Harnesses of our own: each way in, and each way to go wrong."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time

MODEL = "policy"


async def _ask(client, messages) -> str:
    answer = (await client.chat.completions.create(model=MODEL, messages=messages)).choices[0].message
    messages.append({"role": "assistant", "content": answer.content})
    return answer.content or ""


async def told(client, row):
    """Reports 1 where what JSON cannot say came as text."""
    await client.chat.completions.create(model=MODEL, messages=row["messages"])
    return float([row["metadata"][name] for name in ("rate", "count", "at")] == ["nan", "inf", "2026-01-02"])


async def two_turns(client, row):
    """Asks twice and says what came; the reward is the number of the sample."""
    messages = list(row["messages"])
    await _ask(client, messages)
    messages.append({"role": "user", "content": "and then?"})
    await _ask(client, messages)
    return {"reward": float(row["sample"]), "turn_rewards": [0.25, 0.5]}


async def edited(client, row):
    """The second turn goes on, the third has another question at the front."""
    messages = list(row["messages"])
    await _ask(client, messages)
    messages.append({"role": "user", "content": "more"})
    await _ask(client, messages)
    messages[-3:-2] = [{"role": "assistant", "content": "something else"}]
    messages.append({"role": "user", "content": "once more"})
    await _ask(client, messages)
    return float(row["sample"])


async def answers(client, row):
    """What a calculator says, in place of what the policy said."""
    await _ask(client, list(row["messages"]))
    return row["answer"] if row["sample"] % 2 else "999"


async def sometimes_answers(client, row):
    await _ask(client, list(row["messages"]))
    return row["answer"] if row["sample"] % 2 else 0.0


async def misbehaves(client, row):
    """Sample n has fault n; sample 0 has none."""
    await _ask(client, list(row["messages"]))
    match row["sample"]:
        case 0:
            return 1.0
        case 1:
            await client.post("/reward", cast_to=object, body={"reward": 0.5, "correct": False})
            time.sleep(1000)
        case 2:
            raise KeyError("no such tool")
        case 3:
            return None
        case 4:
            return {"reward": 1.0, "metadata": "x" * (24 << 20)}
        case 5:
            print("x" * (24 << 20), flush=True)
            raise ValueError("after much text")
        case 6:
            return 1e9
        case 7:
            os._exit(3)
        case 8:
            escaped = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
            with open(os.environ["PIDS"], "a") as file:
                file.write(f"{escaped.pid}\n")
            await asyncio.sleep(1000)
        case 9:
            for _ in range(100):  # more turns than there are
                await _ask(client, list(row["messages"]))
        case 10:
            from openai import AsyncOpenAI

            other = AsyncOpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key="session-of-somebody-else")
            await _ask(other, list(row["messages"]))
        case 11:
            messages = [{"role": "user", "content": "x" * (24 << 20)}]
            await _ask(client, messages)


async def waits(client, row):
    """Three turns; in half of the episodes the tool takes 2 s each time."""
    messages = list(row["messages"])
    for turn in range(3):
        await _ask(client, messages)
        if turn < 2 and row["index"] % 2:
            await asyncio.sleep(2.0)
        messages.append({"role": "user", "content": "go on"})
    return 1.0


class Waiting:
    """The same as an environment."""

    def reset(self, seed=None):
        self.seed, self.turn = seed, 0
        return f"begin with {seed}", {}

    def step(self, action):
        self.turn += 1
        if self.turn < 3 and self.seed % 2:
            time.sleep(2.0)
        return "go on", 1.0, self.turn == 3, False, {}


async def edited_with_turns(client, row):
    return {"reward": await edited(client, row), "turn_rewards": {"1": 0.5}}


async def edited_and_masked(client, row):
    return {"reward": await edited(client, row), "untrained_turns": [1, 2]}


async def lingers(client, row):
    """Sample 0 asks once, the others twice."""
    return await (two_turns(client, row) if row["sample"] else answers(client, row))


async def sleeps(client, row):
    await _ask(client, list(row["messages"]))
    await asyncio.sleep(1000)


class Counting:
    """Rewards what is as long as the seed says; ends after its third step."""

    def reset(self, seed=None):
        self.steps, self.drawn = 0, random.Random(seed).randrange(1000)
        return f"begin with {self.drawn}", {"suffix": "say something"}

    def step(self, action):
        self.steps += 1
        return f"now {self.steps}", len(action) / 4, self.steps == 3, False, {}
