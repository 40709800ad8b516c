"""Tokenizers of every kind, and of six families of chat templates, for the tests here."""

from support.families import family, family_tokenizers
from support.tokenizers import copy_of, directories, kind, templates, tokenizer, tokenizers

__all__ = [
    "copy_of",
    "directories",
    "family",
    "family_tokenizers",
    "kind",
    "templates",
    "tokenizer",
    "tokenizers",
]
