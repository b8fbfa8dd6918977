"""A checkpoint that says given texts, whatever the prompt is: its next token depends on the position alone.

It is a GPT-2 whose only block adds nothing. Each token has a random code, and the head compares with all codes. The
embedding of a position is the code of the token that follows it, so the scripted token wins by MARGIN at least, and any
number of scripts fits. The tokenizer has one token for each byte, and one for each tag that it is given.

A script is chosen by the length of the prompt. The chat template knows the lengths: the last message is the name of a
script, and the template pads its prompt. So a conversation is one request, with or without tools.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<|im_end|>"
MARGIN = 16.0  # least difference between the logit of the scripted token and any other
_TOP = 40.0  # the logit of the scripted token
_WIDTH = 128
_INNER = 32
_NUM_ENDS = 4  # end tokens behind a script: a model that may not end does not run into the next script
_ROOM = 512  # positions behind the last script, so that any prompt can have as many tokens of output
_PAD = "x"


@dataclass(frozen=True, slots=True)
class Script:
    """What the model says, up to its end token. opening: the end of the prompt, such as a begin tag of reasoning."""

    text: str
    opening: str = ""


@dataclass(frozen=True, slots=True)
class ScriptedModel:
    """A written checkpoint. num_positions: of the model; longer prompts are refused."""

    folder: Path
    tokenizer: Tokenizer
    scripts: Mapping[str, Script]
    lengths: Mapping[str, int]  # of the prompts
    num_positions: int

    def token_ids(self, text: str) -> list[int]:
        """The tokens of a text. Tags that the tokenizer was given are one token each."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def prompt(self, name: str) -> str:
        """The rendered prompt of a script, for routes without a chat template."""
        opening = self.scripts[name].opening
        return _PAD * (self.lengths[name] - len(self.token_ids(opening))) + opening


def write_scripted_model(
    folder: Path,
    scripts: Mapping[str, Script],
    *,
    markup: Iterable[str] = (),
    special: Iterable[str] = (),
    added: Iterable[str] = (),
    without_reasoning: str = "",
) -> ScriptedModel:
    """Write a checkpoint that says the scripts, by name.

    markup: texts by which quire recognizes the format of a chat template. special, added: tags that are one token each;
    special ones are no text. without_reasoning: the end of a prompt that turns reasoning off, in place of its script's.
    """
    folder.mkdir(exist_ok=True)
    core = _byte_tokenizer([END, *special], list(added))
    openings = {script.opening for script in scripts.values()} | {without_reasoning}
    sizes = {opening: len(core.encode(opening).ids) for opening in openings}
    lengths: dict[str, int] = {}
    said = [core.token_to_id(END)] * (max(sizes.values()) + 1)  # the token behind each position
    for name, script in scripts.items():
        lengths[name] = len(said) + 1
        said += [*core.encode(script.text).ids, *[core.token_to_id(END)] * _NUM_ENDS]
    said += [core.token_to_id(END)] * _ROOM
    _write_weights(folder, np.array(said), core.get_vocab_size())
    _write_json(folder / "config.json", _config(core, len(said)))
    core.save(str(folder / "tokenizer.json"))
    template = _template(markup, scripts, lengths, sizes, without_reasoning)
    _write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": template},
    )
    return ScriptedModel(folder, core, dict(scripts), lengths, len(said))


def _byte_tokenizer(special: list[str], added: list[str]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({character: place for place, character in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return core


def _config(core: Tokenizer, num_positions: int) -> dict[str, object]:
    end = core.token_to_id(END)
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": core.get_vocab_size(),
        "n_positions": num_positions,
        "n_embd": _WIDTH,
        "n_layer": 1,
        "n_head": 2,
        "n_inner": _INNER,
        "bos_token_id": end,
        "eos_token_id": end,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def _write_weights(folder: Path, said: np.ndarray, vocab_size: int) -> None:
    codes = np.random.default_rng(1).standard_normal((vocab_size, _WIDTH))
    codes -= codes.mean(1, keepdims=True)
    codes /= codes.std(1, keepdims=True)  # the last norm changes nothing
    head = codes * (_TOP / _WIDTH)
    others = head @ codes.T - np.eye(vocab_size) * 2 * _TOP
    assert others.max() <= _TOP - MARGIN, "two tokens have similar codes"
    inner, block = _INNER, "transformer.h.0."
    zeros = {
        "transformer.wte.weight": (vocab_size, _WIDTH),
        f"{block}attn.c_attn.weight": (_WIDTH, 3 * _WIDTH),
        f"{block}attn.c_attn.bias": (3 * _WIDTH,),
        f"{block}attn.c_proj.weight": (_WIDTH, _WIDTH),
        f"{block}attn.c_proj.bias": (_WIDTH,),
        f"{block}mlp.c_fc.weight": (_WIDTH, inner),
        f"{block}mlp.c_fc.bias": (inner,),
        f"{block}mlp.c_proj.weight": (inner, _WIDTH),
        f"{block}mlp.c_proj.bias": (_WIDTH,),
    }
    norms = ("transformer.ln_f", f"{block}ln_1", f"{block}ln_2")
    weights = {name: np.zeros(shape) for name, shape in zeros.items()}
    weights |= {f"{name}.weight": np.ones(_WIDTH) for name in norms}
    weights |= {f"{name}.bias": np.zeros(_WIDTH) for name in norms}
    weights |= {"transformer.wpe.weight": codes[said], "lm_head.weight": head}
    save_file({name: tensor.astype(np.float32) for name, tensor in weights.items()}, folder / "model.safetensors")


def _template(
    markup: Iterable[str],
    scripts: Mapping[str, Script],
    lengths: Mapping[str, int],
    sizes: Mapping[str, int],
    without_reasoning: str,
) -> str:
    """A chat template that writes the prompt of the script whose name is the last message."""
    known = {name: [script.opening, lengths[name]] for name, script in scripts.items()}
    return "".join(
        [
            f"{{#- tools {' '.join(markup)} -#}}",
            f"{{%- set known = {json.dumps(known)} -%}}",
            f"{{%- set sizes = {json.dumps(sizes)} -%}}",
            "{%- set name = messages[-1].content -%}",
            f"{{%- set script = known[name] if name in known else known[{json.dumps(next(iter(known)))}] -%}}",
            "{%- set opening = script[0] -%}",
            "{%- if enable_thinking is defined and not enable_thinking -%}",
            f"{{%- set opening = {json.dumps(without_reasoning)} -%}}",
            "{%- endif -%}",
            f"{{{{- '{_PAD}' * (script[1] - sizes[opening]) + opening -}}}}",
        ]
    )


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
