"""The chat templates of one model, and what callers may ask of them. Knows conversations, no tokens."""

from collections.abc import Mapping, Sequence

from quire.errors import RequestError, nearest
from quire.tokenizer.chat_template import ChatTemplate
from quire.tokenizer.messages import Message, plain_json, plain_messages
from quire.tokenizer.template_files import DEFAULT, TOOL_USE
from quire.tokenizer.template_final import OpenEnd


class TemplateSet:
    """Compiled templates by name. Raises ModelError for a source that does not compile.

    sources: "default", "tool_use" or any other name -> Jinja source.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._templates = {name: ChatTemplate(source) for name, source in sources.items()}

    def __bool__(self) -> bool:
        return bool(self._templates)

    def choose(self, name: str | None, *, has_tools: bool) -> ChatTemplate:
        """The template of that name; without one, "tool_use" for tools where there is one, else "default".

        Raises RequestError where there is none.
        """
        templates = self._templates
        if not templates:
            raise RequestError(
                "this model has no chat template; use completions with a prompt, or add chat_template.jinja "
                "to the model's folder",
                "messages",
            )
        if name is None:
            name = TOOL_USE if has_tools and TOOL_USE in templates else DEFAULT
        if not isinstance(name, str) or name not in templates:
            known = ", ".join(sorted(templates))
            raise RequestError(
                f"the model has no chat template {name!r:.80}{nearest(str(name), templates)}; it has: {known}",
                "chat_template",
            )
        return templates[name]


def render_conversation(
    template: ChatTemplate,
    messages: Sequence[Message],
    variables: Mapping[str, object],
    *,
    tools: Sequence[Mapping[str, object]] | None,
    documents: Sequence[Mapping[str, object]] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | str,
) -> str:
    """A conversation as text. The arguments are those of `Tokenizer.apply_chat_template`, which explains them."""
    if not isinstance(continue_final_message, bool | str):
        raise RequestError("continue_final_message must be true, false or a field's name", "continue_final_message")
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "continue_final_message goes on with the last message, and add_generation_prompt begins a new one; "
            "set one of them to false",
            "continue_final_message",
        )
    plain = plain_messages(messages)
    end = None
    if continue_final_message:
        end = OpenEnd(plain, "content" if continue_final_message is True else continue_final_message)
        plain = end.messages
    rendered = template.render(
        {
            **{name: plain_json(value, "chat_template_kwargs") for name, value in variables.items()},
            "messages": plain,
            "tools": _objects(tools, "tools"),
            "documents": _objects(documents, "documents"),
            "add_generation_prompt": end is None if add_generation_prompt is None else add_generation_prompt,
        }
    )
    return rendered if end is None else end.cut(rendered)


def _objects(values: Sequence[Mapping[str, object]] | None, name: str) -> object:
    """A plain copy of a list of objects; None for an empty one, which templates would take for some."""
    if not values:
        return None
    if not isinstance(values, list | tuple) or not all(isinstance(value, Mapping) for value in values):
        raise RequestError(f"{name} must be a list of objects", name)
    return plain_json(list(values), name)
