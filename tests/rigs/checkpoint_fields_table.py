"""The tables of docs/models.md about fields of a checkpoint's files, from the data with which quire reads them.

`python tests/rigs/checkpoint_fields_table.py` writes them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from generated_part import GeneratedPart

from quire.models import config_reader
from quire.models.config_fields import names_read
from quire.models.config_reader import OTHER_FAMILIES, UNSUPPORTED
from quire.models.description import FAMILIES, MODEL_TYPES, SAMPLING_FIELDS
from quire.models.rope_config import COMMON_KEYS, ROPE_TYPES, WITHOUT_EFFECT
from quire.models.text_part import TEXT_MODELS
from quire.weights.gguf import config as gguf_config
from quire.weights.quantized_checkpoint import SETTINGS_FILES
from quire.weights.settings import FIELDS, Use

USUAL = (False, True, "sigmoid", "silu")  # values of UNSUPPORTED fields, of which the first that is allowed is shown
LAYOUTS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "compressed-tensors": "compressed-tensors",
    "modelopt": "ModelOpt",
    "fp8": "FP8",
    "mxfp4": "MXFP4",
}


def code(names) -> str:
    """Names as code, in alphabetical order."""
    return ", ".join(f"`{name}`" for name in sorted(names)) or "none"


def values(allowed: Iterable[object]) -> str:
    """The values of a field that are allowed besides null."""
    return ", ".join(["null", *(f"`{value}`" for value in allowed)])


def by_reason(fields: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Each text of the mapping, with the fields that have it."""
    for text in dict.fromkeys(fields.values()):
        yield text, [name for name, one in fields.items() if one == text]


def families() -> Iterator[str]:
    """The fields of config.json that each architecture reads."""
    common = frozenset.intersection(*(names_read(family) for family in FAMILIES.values()))
    yield f"All architectures read {code(common)}. They read these fields besides:\n"
    yield "| architecture | `model_type` | fields |"
    yield "|---|---|---|"
    for architecture, family in FAMILIES.items():
        yield f"| `{architecture}` | {code(MODEL_TYPES[architecture])} | {code(names_read(family) - common)} |"
    for architecture, kinds in TEXT_MODELS.items():
        texts = " or ".join(f"`{text.architecture}`" for text in kinds.values())
        yield f"| `{architecture}` | {code(kinds)} in `text_config` | in `text_config`: those of {texts} |"


def refused_fields() -> Iterator[str]:
    """Fields that change numbers, and values with which they do not; then fields without effect."""
    yield "| refused | with other values than |"
    yield "|---|---|"
    in_any = {name: [value for value in USUAL if not test(value)] for name, test in UNSUPPORTED.items()}
    del in_any["quantization_config"]
    for shown, names in by_reason({name: values(allowed[:1]) for name, allowed in in_any.items()}):
        yield f"| {code(names)} | {shown} |"
    for shown, names in by_reason({name: values(allowed) for name, allowed in OTHER_FAMILIES.items()}):
        yield f"| {code(names)}, where the architecture does not read it | {shown} |"
    yield ""
    yield "| without effect | why |"
    yield "|---|---|"
    for why, names in by_reason(config_reader.WITHOUT_EFFECT):
        yield f"| {code(names)} | {why} |"


def rope_keys() -> Iterator[str]:
    """The keys of rope_parameters and rope_scaling."""
    yield "| `rope_type` | keys |"
    yield "|---|---|"
    yield f"| all | {code(COMMON_KEYS)} |"
    for kind, scaling in ROPE_TYPES.items():
        yield f"| `{kind}` | {code(scaling.keys)} |"
    for name, why in WITHOUT_EFFECT.items():
        yield f"| without effect | `{name}`: {why} |"


def settings(fields: Mapping[str, Use]) -> Iterator[str]:
    """The fields of one layout's settings, those with the same use together."""
    yield "| fields | |"
    yield "|---|---|"
    together: dict[tuple[bool, str, str], list[str]] = {}
    for name, use in fields.items():
        values = ", ".join(f"`{value!r}`" for value in use.values) if use.is_applied else ""
        refused = bool(use.values) and not use.is_applied
        how = f"{'refused' if refused else 'applied' if use.is_applied else 'irrelevant'}: {use.how}"
        together.setdefault((not use.is_applied, how, values), []).append(name)
    for (_, how, values), names in sorted(together.items(), key=lambda pair: pair[0][0]):
        yield f"| {code(names)} | {how}{f'; only {values}' if values else ''} |"


def gguf_architectures() -> Iterator[str]:
    """The architectures of GGUF files, with the classes as which they are read."""
    yield "| `general.architecture` | read as |"
    yield "|---|---|"
    for name, (_, hugging_face, _) in gguf_config.FAMILIES.items():
        key, (_, other, _) = gguf_config.VARIANTS.get(name, ("", ("", "", None)))
        yield f"| `{name}` | `{hugging_face}`{f', with `{key}` `{other}`' if key else ''} |"


def gguf_keys() -> Iterator[str]:
    """The keys of an architecture in a GGUF file."""
    folder = Path(gguf_config.__file__).parent
    sources = [file.read_text(encoding="utf-8") for file in folder.glob("*.py") if file.name != "config.py"]
    asked = {key for source in sources for key in re.findall(r'"(\.[a-z_]+(?:\.[a-z_]+)*)"', source)}
    yield "| keys after the architecture's name | |"
    yield "|---|---|"
    yield f"| {code(asked)} | applied where the architecture has them, else refused |"
    for key, why in gguf_config.UNUSED_KEYS.items():
        yield f"| `{key}` | where nothing reads it, irrelevant: {why} |"
    for key, values in gguf_config.LIMITED_KEYS.items():
        shown = " or ".join(f"`{value}`" for value in values)
        yield f"| `{key}` | where nothing reads it, refused with other values than {shown} |"


def text() -> str:
    """All tables, with headings."""
    parts = ["### Fields of config.json\n", *families(), "", *refused_fields(), ""]
    parts += ["### Keys of rope_parameters and rope_scaling\n", *rope_keys(), ""]
    parts += ["### Fields of generation_config.json\n"]
    applied = code(["bos_token_id", "eos_token_id", *SAMPLING_FIELDS])
    parts += [f"Applied: {applied}. quire reads no other: they are defaults of other programs' requests.\n"]
    files = " or ".join(f"`{file}` (of {LAYOUTS[method]})" for file, method in SETTINGS_FILES.items())
    parts += ["### Settings of quantized weights\n"]
    parts += [f"They are in `quantization_config` of `config.json`, in `compression_config`, or in {files}.\n"]
    for method, title in LAYOUTS.items():
        parts += [f"#### {title}\n", *settings(FIELDS[method]), ""]
    parts += ["### GGUF architectures\n", *gguf_architectures(), ""]
    parts += ["### Keys of a GGUF file\n", *gguf_keys(), ""]
    return "\n".join(parts)


PART = GeneratedPart(
    "models.md",
    begin="<!-- made by tests/rigs/checkpoint_fields_table.py -->\n",
    end="<!-- end of fields -->\n",
    make=text,
)

if __name__ == "__main__":
    PART.write()
