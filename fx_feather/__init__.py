"""fx_feather: a model written once, for one device, and a layout table that splits it over many."""

import types as _types

# How a program is split: meshes, specs, layouts.
from .mesh import Mesh as Mesh
from .spec import P as P
from .spec import Type as Type
from .layout import Layout as Layout
from .layout import Precision as Precision
from .layout import Store as Store

# What a model is written with: parameters, named dims, repeated blocks.
from .param import Param as Param
from .param import given as given
from .param import init as init
from .param import normal as normal
from .param import ones as ones
from .param import truncated_normal as truncated_normal
from .param import uniform as uniform
from .param import zeros as zeros
from .trace import block as block
from .trace import constrain as constrain
from .scan import associative_scan as associative_scan
from .scan import scan as scan
from .module import from_module as from_module

# Compiling and running.
from .compiler import Compiled as Compiled
from .compiler import compile as compile
from .compiler import value_and_grad as value_and_grad
from .step import Step as Step
from .state import State as State
from .step import compile_step as compile_step
from .kernels import faster_matmul as faster_matmul
from .kernels import has_onednn as has_onednn

# Writing texts with a model.
from .generate import Generator as Generator
from .sampling import Sampling as Sampling

# Optimizers and learning rates.
from .optim import Transform as Transform
from .optim import adamw as adamw
from .optim import apply_updates as apply_updates
from .optim import averaged as averaged
from .optim import chain as chain
from .optim import clip_by_global_norm as clip_by_global_norm
from .optim import ema as ema
from .optim import freeze as freeze
from .optim import lion as lion
from .optim import masked as masked
from .optim import multi_transform as multi_transform
from .optim import muon as muon
from .optim import scale as scale
from .optim import sgd as sgd
from .optim import warmup_cosine as warmup_cosine
from .optim import warmup_linear as warmup_linear
from .optim import wsd as wsd

# Per-rank code: manual regions and the typed collectives in them.
from .shard_map import shard_map as shard_map
from .manual import all_gather as all_gather
from .manual import all_gather_invariant as all_gather_invariant
from .manual import all_to_all as all_to_all
from .manual import axis_index as axis_index
from .manual import pmax as pmax
from .manual import ppermute as ppermute
from .manual import pscatter as pscatter
from .manual import psum as psum
from .manual import pvary as pvary
from .manual import reduce_scatter as reduce_scatter
from .collectives import COLLECTIVES as COLLECTIVES

# Random numbers by keys.
from . import random as random

# Rules of one's own operators, property tests of one's own models, checkpoints of others, trees, errors.
from .rules import rule as rule
from . import testing as testing
from . import hf as hf
from . import tree as tree
from .errors import FeatherError as FeatherError

# The named layouts, also where a folder or file of the user's own hides the package `layouts`.
from . import layouts as layouts

__version__ = "0.1.0"

# The names above; the modules that the package is made of are not among them.
__all__ = sorted(
    name
    for name, value in globals().items()
    if not name.startswith("_")
    and (name in ("hf", "layouts", "testing", "tree") or not isinstance(value, _types.ModuleType))
)
__dir__ = __all__.copy
