"""The package `layouts` under a name that nothing hides: `from fx_feather import layouts`."""

import importlib.util
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layouts import *  # noqa: F403

_OWN = Path(__file__).resolve().parent.parent / "layouts" / "__init__.py"


def _load() -> None:
    """Puts the package in this module's place: the one that is imported as `layouts`, or a copy if that is another."""
    found = sys.modules.get("layouts")
    origin = found.__spec__ if found is not None else importlib.util.find_spec("layouts")
    if origin is not None and origin.origin is not None and Path(origin.origin).resolve() == _OWN:
        sys.modules[__name__] = importlib.import_module("layouts")
        return
    if origin is not None:
        hidden = origin.origin or ", ".join(origin.submodule_search_locations or ())
        warnings.warn(
            f"{hidden} hides the package `layouts` that comes with fx_feather: `import layouts` gives the former. "
            "Write `from fx_feather import layouts`, or rename the file or folder.",
            stacklevel=2,
        )
    spec = importlib.util.spec_from_file_location(__name__, _OWN, submodule_search_locations=[str(_OWN.parent)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[__name__] = module
    spec.loader.exec_module(module)


_load()
