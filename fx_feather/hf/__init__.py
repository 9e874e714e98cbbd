"""Hugging Face's format: folders of `config.json` and safetensors, read into a layout's local parts and written."""

from .families import FAMILIES as FAMILIES
from .folder import load as load
from .folder import save as save
from .model import Model as Model
from .tokenizer import tokenizer as tokenizer
