"""The keywords of JSON schema: those whose meaning every output has, those without one, and those that are refused."""

from collections.abc import Mapping
from types import MappingProxyType

ENFORCED = frozenset(
    {
        *("type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf"),
        *("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    }
)

ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "id", "$anchor", "$comment", "$defs", "definitions", "$vocabulary"),
        *("contentMediaType", "contentEncoding", "contentSchema"),
        *(
            "discriminator",
            "externalDocs",
            "xml",
        ),  # OpenAPI's: what they say is said by oneOf, too, or is no constraint
    }
)

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "not": "name what may come instead",
        "if": "use anyOf of the two cases",
        "then": "use anyOf of the two cases",
        "else": "use anyOf of the two cases",
        "contains": "say what items are",
        "minContains": "say what items are",
        "maxContains": "say what items are",
        "uniqueItems": "leave it out; items may repeat",
        "propertyNames": "use patternProperties and additionalProperties: false",
        "dependencies": "use anyOf of the cases",
        "dependentRequired": "use anyOf of the cases",
        "dependentSchemas": "use anyOf of the cases",
        "unevaluatedItems": "use items",
        "unevaluatedProperties": "use additionalProperties",
        "$dynamicRef": "use $ref",
        "$dynamicAnchor": "use $defs and $ref",
        "$recursiveRef": "use $ref",
        "$recursiveAnchor": "use $ref",
        "nullable": 'use "type": [..., "null"]',
    }
)

KNOWN = ENFORCED | ANNOTATIONS | frozenset(REFUSED)

TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})

DIALECTS = frozenset(
    {
        *(f"json-schema.org/draft/{year}/schema" for year in ("2020-12", "2019-09")),
        *(f"json-schema.org/draft-{number}/schema" for number in ("07", "06", "04")),
    }
)
