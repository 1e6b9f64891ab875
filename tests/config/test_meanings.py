"""Every key of a config has a meaning below it, from which the reference page is made."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any, get_args

import pytest

from vitcli.config import attention_variants as attention
from vitcli.config import schema, training, variants

SECTIONS = [
    value
    for module in (attention, schema, training)
    for value in vars(module).values()
    if inspect.isclass(value)
    and issubclass(value, schema.Section)
    and value is not schema.Section
    and value.__module__ == module.__name__
]


def meanings(section: type[schema.Section]) -> dict[str, str]:
    """The string below each key that the class itself declares; empty where there is none."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(node, ast.ClassDef)
    found: dict[str, str] = {}
    for line, below in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            text = below.value if isinstance(below, ast.Expr) else None
            found[line.target.id] = str(text.value) if isinstance(text, ast.Constant) else ""
    return found


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_key_and_section_says_what_it_means(section: type[schema.Section]) -> None:
    lacking = [key for key, text in meanings(section).items() if len(text.split()) < 2]
    assert meanings(section) and not lacking
    assert section.__doc__ and section.__doc__ != schema.Section.__doc__


@pytest.mark.parametrize(
    ("section", "key", "words"),
    [
        (schema.EncoderConfig, "position", attention.POSITIONS),
        (schema.EncoderConfig, "pooling", variants.POOLINGS),
        (schema.EncoderConfig, "head", variants.HEADS),
        (schema.EncoderConfig, "norm", variants.NORMS),
        (schema.EncoderConfig, "mlp", variants.MLPS),
        (schema.AttentionConfig, "mask", attention.MASKS),
        (schema.AttentionConfig, "over", attention.ATTENTIONS),
        (schema.AttentionConfig, "qkv_bias", attention.QKV_BIASES),
        (schema.AttentionConfig, "qk_norm", attention.QK_NORMS),
        (schema.PreprocessConfig, "resize", get_args(schema.ResizeKind)),
        (schema.PreprocessConfig, "filter", get_args(schema.FilterKind)),
        (schema.EncoderConfig, "activation", get_args(schema.ActivationKind)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_meaning_of_a_choice_names_every_word(
    section: type[schema.Section], key: str, words: Any
) -> None:
    text = meanings(section)[key].replace(",", " ").replace(":", " ").replace(";", " ")
    assert set(words) <= {word.strip(".()") for word in text.split()}
