"""Named layouts, one a file: a table, and what it splits, replicates and communicates. They compose by `|`."""

from .cp import cp as cp
from .ddp import ddp as ddp
from .fsdp import fsdp as fsdp
from .fsdp import zero3 as zero3
from .hsdp import hsdp as hsdp
from .mixed import mixed as mixed
from .single import single as single
from .sp import tp_sp as tp_sp
from .tp import tp as tp
from .zero1 import zero1 as zero1
from .zero2 import zero2 as zero2
