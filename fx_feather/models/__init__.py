"""Whole models, each a config, a template and pure functions: the wiring of blocks from `fx_feather.nn`."""

from . import llama as llama
