"""Tokenizers of every kind and chat templates, for the tests here."""

from support.tokenizers import copy_of, directories, kind, loaded, templates, tokenizer, tokenizers

__all__ = ["copy_of", "directories", "kind", "loaded", "templates", "tokenizer", "tokenizers"]
