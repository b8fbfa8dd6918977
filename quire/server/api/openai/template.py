"""Conversations of HTTP bodies, made ready for the model's chat template. Knows the bodies, no answers."""

from collections.abc import Mapping, Sequence

from quire.engine.inputs import TokenizedPrompt, template_variables, tokenize
from quire.server.api.openai.messages import ChatMessage, TemplateBody
from quire.tokenizer.messages import plain_messages
from quire.tokenizer.tokenizer import Tokenizer

_OWN_FIELDS = (
    *("messages", "tools", "documents", "chat_template"),
    *("add_generation_prompt", "continue_final_message"),
)


def spoken(messages: Sequence[ChatMessage]) -> list[dict[str, object]]:
    """The messages as chat templates know them."""
    plain = [message.model_dump(exclude_none=True) for message in messages]
    for message in plain:
        if message["role"] == "developer":  # OpenAI's newer name, which few templates know
            message["role"] = "system"
    return plain


def begun_answer(messages: Sequence[Mapping[str, object]]) -> str:
    """What the assistant has said already in its last turn, where the conversation ends with that."""
    if not messages or messages[-1]["role"] != "assistant":
        return ""
    return str(plain_messages(messages[-1:])[0]["content"] or "")


def tokenize_conversation(
    messages: Sequence[Mapping[str, object]], body: TemplateBody, tokenizer: Tokenizer
) -> TokenizedPrompt:
    """The conversation as the model's chat template writes it. Raises RequestError, ModelError."""
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    variables = template_variables(body.chat_template_kwargs, (*_OWN_FIELDS, *effort))
    text = tokenizer.apply_chat_template(
        messages,
        None if body.tool_choice == "none" else body.tools,
        body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        documents=body.documents,
        chat_template=body.chat_template,
        **(variables | effort),
    )
    return tokenize(text, tokenizer, add_special_tokens=bool(body.add_special_tokens))
