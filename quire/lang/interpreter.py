"""Execution of a program's operations. All methods run on the backend's event loop."""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from quire.core.scheduling_params import Program
from quire.errors import RequestError
from quire.lang import expressions
from quire.lang.api_speculation import ChatTurn, Completion, SpeculatedText, finish_type
from quire.lang.backends.backend import Backend, Piece
from quire.lang.errors import GenerationFailed
from quire.lang.params import GenParams
from quire.lang.state_text import Cut, StateText

_END_OF_THOUGHT = "</think>"
_BEGIN_OF_THOUGHT = "<think>"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Options of a run, which all its streams share."""

    backend: Backend
    defaults: GenParams
    streaming: bool = False
    num_api_spec_tokens: int | None = None


class Executor:
    """Executes the operations of one stream.

    next_program: returns the program hints of the next call. on_change: called after each new piece of generated text.
    """

    def __init__(
        self,
        setting: Setting,
        state_text: StateText,
        next_program: Callable[[], Program | None],
        on_change: Callable[[], None],
    ) -> None:
        self.state_text = state_text
        self.chat_turn: ChatTurn | None = None  # open turn of a chat endpoint, which is generated at its end
        self._setting = setting
        self._backend = setting.backend
        self._speculated = SpeculatedText(setting.num_api_spec_tokens)
        self._next_program = next_program
        self._on_change = on_change

    async def execute(self, op: expressions.Expr) -> None:
        """Execute one operation. Raises RequestError, and the errors of model calls."""
        state_text = self.state_text
        match op:
            case expressions.Text(text):
                self.fill(text)
            case expressions.Gen():
                await self._gen(op)
            case expressions.Select():
                await self._select(op)
            case expressions.RoleBegin(role):
                await self._begin(role)
            case expressions.RoleEnd(role):
                await self._end(role)
            case expressions.Assign(name, value):
                state_text.variables[name] = value
            case expressions.ScopeBegin(name):
                state_text.scopes.append((name, state_text.length))
            case expressions.ScopeEnd(name):
                state_text.variables[name] = state_text.end_scope(name)
            case _:
                raise RequestError(f"{type(op).__name__} cannot be appended")

    def fill(self, text: str) -> None:
        """Append text of the program."""
        if self.chat_turn is not None:
            self.chat_turn.fill(text)
            return
        self._speculated.fill(text)
        self.state_text.write(text)

    # Generated text

    async def _gen(self, op: expressions.Gen) -> None:
        params = self._setting.defaults.with_overrides(op.overrides)
        params.check()
        if self.chat_turn is not None:
            self.chat_turn.gen(op.name, params)
            return
        if self._speculated.supports(params):
            written = await self._speculated.generate(params, self._completion)
            self.state_text.write(written.text)
            self._set_variable(op.name, written.text, written.meta)
            return
        self._speculated.clear()
        await self._generate(op.name, params)

    async def _generate(self, name: str | None, params: GenParams) -> None:
        """Generate piece by piece. Of n sequences, the first is appended to the text."""
        state_text = self.state_text
        texts = [""] * params.n
        streaming = self._setting.streaming and params.n == 1
        async with aclosing(self._pieces(params, stream=streaming)) as pieces:
            async for piece in pieces:
                texts[piece.index] += piece.text
                if piece.index == 0:
                    state_text.write(piece.text)
                meta = piece.meta if piece.index == 0 else None
                self._set_variable(name, texts[0] if params.n == 1 else texts, meta)
                self._on_change()
        self._set_variable(name, texts[0] if params.n == 1 else texts, None)

    async def _completion(self, params: GenParams) -> Completion:
        """The whole output of a call with one sequence."""
        text, meta = "", {}
        async with aclosing(self._pieces(params, stream=False)) as pieces:
            async for piece in pieces:
                text, meta = text + piece.text, piece.meta
        return Completion(text, meta)

    async def _pieces(self, params: GenParams, *, stream: bool) -> AsyncGenerator[Piece]:
        """The pieces of one call. Raises GenerationFailed if a sequence is incomplete or ended with an error."""
        metas: dict[int, dict[str, object]] = {}
        pieces = self._backend.generate(self.state_text.prompt(), params, self._next_program(), stream=stream)
        async with aclosing(pieces):
            async for piece in pieces:
                if not 0 <= piece.index < params.n:
                    raise GenerationFailed(f"the backend returned more than the {params.n} requested outputs")
                metas[piece.index] = piece.meta
                yield piece
        for index in range(params.n):
            check_end(metas.get(index, {}))

    async def _select(self, op: expressions.Select) -> None:
        if self.chat_turn is not None:
            raise RequestError("select is not possible in a turn that a chat endpoint generates in one call")
        adapter = op.adapter or self._setting.defaults.adapter
        asked = (self.state_text.prompt(), op.choices, op.method, self._next_program())
        decision = await self._backend.select(*asked, adapter=adapter)
        self.fill(decision.decision)
        self._set_variable(op.name, decision.decision, decision.meta_info)

    def _set_variable(self, name: str | None, value: object, meta: dict[str, object] | None) -> None:
        if name is None:
            return
        self.state_text.variables[name] = value
        if meta is not None:
            self.state_text.meta[name] = meta
        else:
            self.state_text.meta.setdefault(name, {})

    def separate_reasoning(self, name: str) -> None:
        """Move the reasoning out of the latest output. Raises RequestError if the variable is no text."""
        if self.chat_turn is not None:
            raise RequestError(
                "separate_reasoning is not possible in a turn that a chat endpoint generates in one call"
            )
        state_text = self.state_text
        output = state_text.variables.get(name)
        if not isinstance(output, str):
            raise RequestError(f"separate_reasoning needs one text, and {name!r} is not one")
        thought, mark, answer = output.rpartition(_END_OF_THOUGHT)
        state_text.variables[f"{name}_reasoning_content"] = thought.strip().removeprefix(_BEGIN_OF_THOUGHT).strip()
        answer = answer.lstrip() if mark else answer
        state_text.variables[name] = answer
        length = len(output) - len(answer)
        if length:
            state_text.cut(state_text.length - len(output), length)  # the output is at the end of the text
            state_text.cuts.append(Cut(name, 0, length))

    # Turns

    async def _begin(self, role: expressions.Role) -> None:
        state_text = self.state_text
        if state_text.role is not None:
            raise RequestError(f"the {role}'s turn begins inside the {state_text.role}'s; end that one first")
        texts = await self._backend.role_texts(self._roles(role))
        self.fill(texts.prefix)
        state_text.role, state_text.turn_start = role, state_text.length
        spec = self._setting.num_api_spec_tokens
        if role == "assistant" and spec is not None and self._backend.is_chat_model:
            self.chat_turn = ChatTurn(spec)

    async def _end(self, role: expressions.Role) -> None:
        state_text = self.state_text
        if state_text.role != role:
            raise RequestError(f"cannot end the {role}'s turn: the open turn is {state_text.role or 'none'}")
        if self.chat_turn is not None:
            await self._end_chat_turn(self.chat_turn)
        texts = await self._backend.role_texts(self._roles(role))
        content = state_text.turn.lstrip()
        state_text.role = None
        state_text.messages.append({"role": role, "content": content})
        self.fill(texts.suffix)

    async def _end_chat_turn(self, turn: ChatTurn) -> None:
        self.chat_turn = None
        for part in await turn.complete(self._completion):
            self.state_text.write(part.text)
            self._set_variable(part.name, part.text, part.meta)

    def _roles(self, last: expressions.Role) -> tuple[str, ...]:
        return (*(message["role"] for message in self.state_text.messages), last)


def check_end(meta: Mapping[str, object]) -> None:
    """Raises GenerationFailed if a sequence did not end, or ended with an error. meta: its last meta info."""
    reason = finish_type(meta)
    if reason is None:
        raise GenerationFailed("the response was cut off: it ends without a finish reason")
    if reason in ("error", "abort"):
        finish_reason = meta.get("finish_reason")
        why = finish_reason.get("message") if isinstance(finish_reason, Mapping) else None
        raise GenerationFailed(f"the generation failed: {why or reason}")
