"""Backend for a quire server, through SGLang's native route /generate."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from quire.core.scheduling_params import Program
from quire.errors import QuireError
from quire.lang.backends.backend import Backend, Piece, RoleTexts
from quire.lang.backends.http import Http, response_errors
from quire.lang.backends.roles import TemplateRoles
from quire.lang.params import GenParams
from quire.lang.select import ChoicesDecision, ChoicesSamplingMethod, TokenLogprob, common_prefix_len, decide
from quire.lang.state_text import Message, Prompt

_LOOK_BACK = 8  # tokens at a prompt's end that a choice may change; more are requested if it changes all of these


class RuntimeEndpoint(Backend):
    """Backend for a server at `base_url`. The constructor requests the server's model.

    verify: a file of certificates, or False to check none. hints: whether requests carry program hints, which only
    quire supports. Raises RequestError, GenerationFailed.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        verify: str | bool | None = None,
        hints: bool = True,
    ) -> None:
        self._http = Http(base_url, api_key, verify=verify)
        super().__init__(hints=hints)
        self._roles = TemplateRoles(self._render)
        self._bos_text: str | None = None  # the text of the special tokens that the tokenizer adds at the begin
        try:
            models = self.loop.run(self._http.get("/v1/models"))
            with response_errors():
                self.model_info = dict(models["data"][0])
        except BaseException:
            self.close()
            raise

    def get_model_name(self) -> str:
        """Id of the served model."""
        return str(self.model_info["id"])

    def get_server_info(self) -> dict[str, Any]:
        """The model's entry of /v1/models, and the answer of /health."""
        return {**self.model_info, **self.loop.run(self._http.get("/health"))}

    async def generate(
        self, prompt: Prompt, params: GenParams, program: Program | None, *, stream: bool
    ) -> AsyncGenerator[Piece]:
        """See Backend. Raises RequestError, GenerationFailed."""
        body = {
            "text": await self._without_bos(prompt.text),
            "sampling_params": sampling_params(params),
            **_logprob_fields(params),
            **({"tools": list(params.tools), "tool_choice": params.tool_choice} if params.tools else {}),
            **self._hint(program),
            **_adapter_field(params.adapter),
        }
        self.stats.num_calls += 1
        if not stream:
            answer = await self._http.post("/generate", body)
            with response_errors():
                outputs = answer if isinstance(answer, list) else [answer]
                pieces = [Piece(one["text"], dict(one["meta_info"]), index) for index, one in enumerate(outputs)]
                self._count([piece.meta for piece in pieces])
            for piece in pieces:
                yield piece
            return
        length, meta = 0, {}
        try:
            async with aclosing(self._http.events("/generate", {**body, "stream": True})) as events:
                async for event in events:
                    with response_errors():
                        text, meta = str(event["text"]), dict(event["meta_info"])
                    yield Piece(text[length:], meta)
                    length = len(text)
        finally:
            self._count([meta])

    async def select(
        self,
        prompt: Prompt,
        choices: tuple[str, ...],
        method: ChoicesSamplingMethod,
        program: Program | None,
        *,
        adapter: str | None = None,
    ) -> ChoicesDecision:
        """See Backend. Raises RequestError, GenerationFailed."""
        text = await self._without_bos(prompt.text)
        before = await self._tokenize({"prompt": text})
        texts, more = [text + choice for choice in choices], _adapter_field(adapter)
        scores = await self._choice_logprobs(before, texts, _LOOK_BACK, {**self._hint(program), **more})
        alone = None
        if method.requires_unconditional_logprobs:
            own = [[entry[1] for entry in entries] for entries in scores]
            alone = await self._prompt_logprobs({"input_ids": own}, [0] * len(own), more)
        return decide(choices, method, scores, alone)

    async def role_texts(self, roles: tuple[str, ...]) -> RoleTexts:
        """The texts of the model's chat template. Raises RequestError."""
        return await self._roles.texts(roles)

    async def prefetch(self, text: str, program: Program | None) -> None:
        """Compute the KV of a text."""
        body = {"text": await self._without_bos(text), "sampling_params": {"max_new_tokens": 0}}
        await self._http.post("/generate", {**body, **self._hint(program)})

    async def end_program(self, program: str, branch: str | None) -> None:
        """End the branch in the server's engine, which then evicts its KV first."""
        named = {} if branch is None else {"branch": branch}
        await self._http.post("/v1/programs/end", {"id": program, **named})

    async def flush_cache_async(self) -> None:
        """Evict cached KV that no running request uses."""
        await self._http.post("/flush_cache", {})

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def _choice_logprobs(
        self, before: Sequence[int], texts: Sequence[str], look_back: int, fields: Mapping[str, object]
    ) -> list[list[TokenLogprob]]:
        """Entries of each text's tokens after the prefix that it shares with the tokens `before`.

        fields: further ones of the bodies. The server returns tokens and logprobs from `look_back` tokens before the
        end of `before`. If a text differs already there, all tokens are requested.
        """
        start = max(len(before) - look_back, 0)
        logprobs = await self._prompt_logprobs({"text": list(texts)}, [start] * len(texts), fields)
        shared = [common_prefix_len(before[start:], [entry[1] for entry in entries]) for entries in logprobs]
        if start and not all(shared):
            return await self._choice_logprobs(before, texts, len(before), fields)
        return [entries[number:] for entries, number in zip(logprobs, shared, strict=True)]

    async def _prompt_logprobs(
        self, prompts: dict[str, object], starts: Sequence[int], fields: Mapping[str, object]
    ) -> list[list[TokenLogprob]]:
        """Entries of each prompt's tokens from index `starts` on. The first of them has no logprob."""
        body = {
            **prompts,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "return_text_in_logprobs": True,
            "logprob_start_len": list(starts),
            **fields,
        }
        self.stats.num_calls += 1
        answer = await self._http.post("/generate", body)
        with response_errors():
            metas = [one["meta_info"] for one in answer]
            self._count(metas)
            return [[(entry[0], entry[1], entry[2]) for entry in one["input_token_logprobs"]] for one in metas]

    async def _render(self, messages: list[Message], *, add_generation_prompt: bool) -> str:
        tokens = await self._tokenize({"messages": messages, "add_generation_prompt": add_generation_prompt})
        return await self._detokenize(tokens)

    async def _tokenize(self, body: dict[str, object]) -> list[int]:
        answer = await self._http.post("/tokenize", body)
        with response_errors():
            return list(answer["tokens"])

    async def _detokenize(self, tokens: Sequence[int]) -> str:
        answer = await self._http.post("/detokenize", {"tokens": list(tokens)})
        with response_errors():
            return str(answer["prompt"])

    async def _without_bos(self, text: str) -> str:
        """The text without the leading special tokens, which the server's tokenizer adds."""
        if self._bos_text is None:
            try:
                self._bos_text = await self._detokenize(await self._tokenize({"prompt": ""}))
            except QuireError:
                self._bos_text = ""
        return text.removeprefix(self._bos_text) if self._bos_text else text

    def _hint(self, program: Program | None) -> dict[str, object]:
        if program is None:
            return {}
        return {"program": {"id": program.id, "branch": program.branch, "expects_more": program.expects_more}}

    def _count(self, metas: Sequence[dict[str, Any]]) -> None:
        """Add tokens to the stats. The prompt of n sequences counts once."""
        first = metas[0] if metas else {}
        same = [one for one in metas if one.get("id") != first.get("id")]
        for meta in [first, *same]:
            self.stats.count(meta.get("prompt_tokens", 0), 0, meta.get("cached_tokens", 0))
        self.stats.count(0, sum(meta.get("completion_tokens", 0) for meta in metas))


def sampling_params(params: GenParams) -> dict[str, object]:
    """The `sampling_params` of a /generate body."""
    asked: dict[str, object] = {
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "n": params.n,
        "min_new_tokens": params.min_tokens,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "stop_regex": list(params.stop_regex),
        "ignore_eos": params.ignore_eos,
        "sampling_seed": params.seed,
        "prediction": params.prediction,
        "regex": params.regex,
        "json_schema": params.json_schema,
        "ebnf": params.ebnf,
    }
    return {name: value for name, value in asked.items() if value is not None and value != []}


def _adapter_field(adapter: str | None) -> dict[str, object]:
    return {} if adapter is None else {"lora_path": adapter}


def _logprob_fields(params: GenParams) -> dict[str, object]:
    if not params.return_logprob:
        return {}
    asked: dict[str, object] = {
        "return_logprob": True,
        "logprob_start_len": params.logprob_start_len,
        "top_logprobs_num": params.top_logprobs_num,
        "return_text_in_logprobs": params.return_text_in_logprobs,
    }
    return {name: value for name, value in asked.items() if value is not None}
