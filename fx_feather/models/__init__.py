"""Whole models, each a config, a template and pure functions: the wiring of blocks from `fx_feather.nn`."""

from . import accounting as accounting
from . import deepseek_v2 as deepseek_v2
from . import deepseek_v3 as deepseek_v3
from . import gpt2 as gpt2
from . import llama as llama
from . import mixtral as mixtral
from . import presets as presets
from . import qwen3 as qwen3
from . import qwen3_moe as qwen3_moe
