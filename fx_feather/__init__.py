"""fx_feather: a model written once, for one device, and a layout table that splits it over many."""

# Property tests of one's own model.
# Checkpoints in Hugging Face's format.
from . import hf as hf
from . import testing as testing

# Typed collectives, for manual regions.
from .collectives import COLLECTIVES as COLLECTIVES

# Compiling and running.
from .compile import Compiled as Compiled
from .compile import compile as compile
from .compile import value_and_grad as value_and_grad

# Meshes, specs and layouts: how a program is split.
from .errors import FeatherError as FeatherError
from .layout import Layout as Layout
from .layout import Precision as Precision
from .layout import Store as Store
from .mesh import Mesh as Mesh

# Optimizers.
from .optim import Transform as Transform
from .optim import adamw as adamw
from .optim import chain as chain
from .optim import clip_by_global_norm as clip_by_global_norm
from .optim import sgd as sgd
from .optim import warmup_cosine as warmup_cosine
from .optim import warmup_linear as warmup_linear
from .optim import wsd as wsd

# Parameters and their initial values.
from .param import Param as Param
from .param import init as init
from .param import normal as normal
from .param import ones as ones
from .param import truncated_normal as truncated_normal
from .param import uniform as uniform
from .param import zeros as zeros
from .rules import rule as rule
from .shard_map import all_gather as all_gather
from .shard_map import all_gather_invariant as all_gather_invariant
from .shard_map import all_to_all as all_to_all
from .shard_map import axis_index as axis_index
from .shard_map import pmax as pmax
from .shard_map import ppermute as ppermute
from .shard_map import pscatter as pscatter
from .shard_map import psum as psum
from .shard_map import pvary as pvary
from .shard_map import reduce_scatter as reduce_scatter
from .shard_map import shard_map as shard_map
from .spec import P as P
from .spec import Type as Type
from .step import State as State
from .step import Step as Step
from .step import compile_step as compile_step
from .trace import block as block
from .trace import constrain as constrain
