"""Conversations in request bodies: messages, and how they become a prompt. Knows names and types, no template."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quire.server.api.field_types import Listed
from quire.server.api.request_params import Body, about, not_yet, unknown_field
from quire.tokenizer.messages import MAX_MESSAGES


class ContentPart(BaseModel):
    """A piece of a message. Only text is supported yet."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _know_all_fields_of_a_text(self) -> Self:
        for name in self.model_extra if self.text is not None and self.model_extra else ():
            raise unknown_field(name, type(self).model_fields)
        return self


class ChatMessage(Body):
    """One turn of a conversation, also as an answer of this server sends it back."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Listed[ContentPart] | None = None
    name: str | None = None
    tool_calls: Listed[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: Any = not_yet([])
    audio: Any = not_yet()
    function_call: Any = not_yet()


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)]


class TemplateBody(Body):
    """How a conversation becomes a prompt."""

    tools: Listed[dict[str, Any]] | None = about("Passed to the model's chat template.")
    documents: Listed[dict[str, Any]] | None = about("Passed to the model's chat template.")
    chat_template_kwargs: dict[str, Any] | None = about("Switches of the chat template, such as enable_thinking.")
    add_generation_prompt: bool | None = about("Begin the assistant's turn; true by default.")
    continue_final_message: bool | None = about("Go on with the last message in place of a new turn.")
    add_special_tokens: bool | None = about("Let the tokenizer add begin and end tokens; false by default.")
    tool_choice: Any = not_yet("auto", "none")
    reasoning_effort: str | None = about("Passed to the model's chat template.")
    chat_template: str | None = about("Name of one of the model's own templates.")
