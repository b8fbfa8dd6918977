"""Special and added tokens as a model folder declares them beside its tokenizer. Knows JSON objects, no files.

The rules are those of transformers 5: tokenizer_config.json names tokens ("eos_token") and lists added ones;
older folders spread that over special_tokens_map.json and added_tokens.json. What the tokenizer does not
have, or has with other flags, is added to it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken

from quire.errors import ModelError

_STANDARD_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def add_declared_tokens(
    core: tokenizers.Tokenizer, config: Mapping[str, Any], special_map: Mapping[str, Any], added: Mapping[str, Any]
) -> dict[str, str]:
    """Add to `core` what it lacks, and return the named tokens: "eos_token" -> text.

    The mappings are the contents of tokenizer_config.json, special_tokens_map.json and added_tokens.json.
    Raises ModelError for a token that is none.
    """
    listed = config.get("added_tokens_decoder")
    fields = config if listed is not None else {**config, **special_map}
    extra = fields.get("extra_special_tokens") or fields.get("additional_special_tokens") or []
    named = _named(fields)
    if isinstance(extra, Mapping):  # these have names, too
        named |= {str(name): _token(value, special=True) for name, value in extra.items()}
        extra = []
    if not isinstance(extra, list):
        raise ModelError("the extra special tokens of a folder must be a list, or an object of named ones")
    special = [*named.values(), *(_token(value, special=True) for value in extra)]
    if listed is None:
        _add(core, (*_older(added, special), *special))
    else:
        _add(core, special, _listed(listed, special))
    return {name: token.content for name, token in named.items()}


def _add(core: tokenizers.Tokenizer, missing: Iterable[AddedToken], exact: Iterable[AddedToken] = ()) -> None:
    """Add tokens that are `missing`, and those of `exact` that are missing or have other flags."""
    have = core.get_added_tokens_decoder().values()
    flags = {_flags(token) for token in have}
    new = {token.content: token for token in exact if _flags(token) not in flags}
    known = {token.content for token in have} | new.keys()
    for token in missing:
        if token.content not in known:
            new.setdefault(token.content, token)
    core.add_tokens(list(new.values()))


def _named(fields: Mapping[str, Any]) -> dict[str, AddedToken]:
    names = [name for name in _STANDARD_NAMES if fields.get(name) is not None]
    own = (name for name in fields if name.endswith("_token") and name not in _STANDARD_NAMES)
    names += [name for name in own if isinstance(fields[name], str) or _is_token(fields[name])]
    return {name: _token(fields[name], special=True) for name in names}


def _listed(listed: object, special: Iterable[AddedToken]) -> list[AddedToken]:
    """The added_tokens_decoder of tokenizer_config.json: id -> token, with its flags."""
    contents = {token.content for token in special}
    if not isinstance(listed, Mapping) or not all(_is_token(value) for value in listed.values()):
        raise ModelError("added_tokens_decoder in tokenizer_config.json must list tokens by their ids")
    ordered = [listed[key] for key in sorted(listed, key=_id)]
    return [_token(value, special=value["content"] in contents or value.get("special") is True) for value in ordered]


def _older(added: Mapping[str, Any], special: Iterable[AddedToken]) -> list[AddedToken]:
    """The contents of an added_tokens.json: text -> id."""
    contents = {token.content for token in special}
    return [AddedToken(text, special=text in contents) for text in sorted(added, key=lambda text: _id(added[text]))]


def _id(value: object) -> int:
    if isinstance(value, int) or (isinstance(value, str) and value.isdecimal()):
        return int(value)
    raise ModelError(f"the id of an added token must be a whole number, not {value!r:.80}")


def _is_token(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("content"), str)


def _token(value: object, *, special: bool) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=special)
    if isinstance(value, Mapping) and _is_token(value):
        flags = {name: value[name] for name in _FLAGS if isinstance(value.get(name), bool)}
        return AddedToken(value["content"], **{**flags, "special": special})
    raise ModelError(f"a special token must be a string, or an object with its content, not {value!r:.80}")


def _flags(token: AddedToken) -> tuple[object, ...]:
    return (token.content, *(getattr(token, name) for name in _FLAGS))
