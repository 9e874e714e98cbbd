"""Functions of whole tensors on one device that are faster than the operators they are made of, each with its vjp."""

from .adamw import adamw as adamw
from .experts import experts as experts
from .finite import finite as finite
from .grouped import grouped_matmul as grouped_matmul
from .matmul import faster_matmul as faster_matmul
from .matmul import has_onednn as has_onednn
from .matmul import onednn_mm as onednn_mm
from .random import draw as draw
from .scheduled import named as named
from .scheduled import scheduled as scheduled
from .squares import sum_squares as sum_squares
