"""Property tests of one's own model: strategies for meshes, layouts and batches, and the law they are held to."""

from .equivalence import assert_equivalent as assert_equivalent
from .strategies import KINDS as KINDS
from .strategies import batches as batches
from .strategies import compositions as compositions
from .strategies import layouts as layouts
from .strategies import meshes as meshes
from .strategies import parallelisms as parallelisms
from .strategies import specs as specs
