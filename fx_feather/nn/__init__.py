"""Blocks of models: each is a template of parameters and a pure function of them."""

from . import attention as attention
from . import balance as balance
from . import cache as cache
from . import embed as embed
from . import linear as linear
from . import loss as loss
from . import mla as mla
from . import mlp as mlp
from . import moe as moe
from . import norm as norm
from . import rope as rope
from . import rope_scaling as rope_scaling
from . import router as router
