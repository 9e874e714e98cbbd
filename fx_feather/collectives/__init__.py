"""The typed collectives: values that say what each does, and the functions that apply them to one rank's value."""

from .gather import all_gather as all_gather
from .gather import all_gather_invariant as all_gather_invariant
from .gather import pad as pad
from .gather import pscatter as pscatter
from .gather import pscatter_replicated as pscatter_replicated
from .gather import reduce_scatter as reduce_scatter
from .permute import all_to_all as all_to_all
from .permute import axis_index as axis_index
from .permute import ppermute as ppermute
from .primitive import COLLECTIVES as COLLECTIVES
from .primitive import Collective as Collective
from .primitive import Executor as Executor
from .primitive import executed_by as executed_by
from .primitive import lockstep as lockstep
from .reduce import keep_first as keep_first
from .reduce import keep_first_replicated as keep_first_replicated
from .reduce import pmax as pmax
from .reduce import psum as psum
from .reduce import pvary as pvary
from .reduce import unvary as unvary
