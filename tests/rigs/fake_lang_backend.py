"""A backend without a model: a function gives the text, and the calls are recorded."""

import asyncio
import re
from dataclasses import dataclass, field

from quire.lang.backends.backend import Backend, Piece, RoleTexts
from quire.lang.select import ChoicesDecision

ENDS = "."  # ends a sentence of the fake model


def echo(text, params):
    """A different answer for each prompt: its length and last character."""
    return f"[{len(text)}{text[-1:]}]"


@dataclass
class Asked:
    text: str
    params: object
    program: object
    messages: tuple = ()
    adapter: str | None = None


@dataclass
class Gate:
    """Blocks calls whose prompt ends with `behind` until `opened` is set."""

    behind: str
    opened: asyncio.Event = field(default_factory=asyncio.Event)


class Pretend(Backend):
    """answer(prompt text, params) -> text, a list of n texts, or an exception to raise."""

    def __init__(self, answer=lambda text, params: " yes", *, hints=True, chat=False, gates=()):
        super().__init__(hints=hints)
        self.is_chat_model = chat
        self.answer = answer
        self.asked = []
        self.ended_branches = []
        self.gates = {gate: asyncio.Event() for gate in gates}
        self.num_running = self.most_running = 0

    def open(self, gate):
        self.loop.call_soon(self.gates[gate].set)

    async def generate(self, prompt, params, program, *, stream):
        self.asked.append(Asked(prompt.text, params, program, prompt.messages))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            for gate, opened in self.gates.items():
                if prompt.text.endswith(gate):
                    await opened.wait()
            await asyncio.sleep(0)
            answer = self.answer(prompt.text, params)
            if isinstance(answer, BaseException):
                raise answer
            for index, text in enumerate([answer] if isinstance(answer, str) else answer):
                for piece in re.findall(r"\s*\S+", text) if stream else [text]:
                    yield Piece(
                        piece, {"finish_reason": {"type": "stop"}, "prompt": prompt.text, "index": index}, index
                    )
                    await asyncio.sleep(0)
        finally:
            self.num_running -= 1

    async def select(self, prompt, choices, method, program, *, adapter=None):
        self.asked.append(Asked(prompt.text, choices, program, adapter=adapter))
        return ChoicesDecision(max(choices, key=len), {"normalized_prompt_logprobs": [0.0] * len(choices)})

    async def role_texts(self, roles):
        return RoleTexts(f"<{roles[-1]}>", f"</{roles[-1]}>\n")

    async def end_program(self, program, branch):
        self.ended_branches.append((program, branch))
