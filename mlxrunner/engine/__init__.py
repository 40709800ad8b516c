"""Requests on a model: slots that share prefixes, one row of tokens per step, samplers, drafts."""
