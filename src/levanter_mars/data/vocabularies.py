"""`check_vocabularies` for any Levanter. In Stanford's, data has no components, so that there are no token files to check."""

import importlib.util
from typing import Any

_text = importlib.util.find_spec("levanter.data.text")
if _text is not None and _text.submodule_search_locations is not None:
    from levanter_mars.data.component import check_vocabularies
else:

    def check_vocabularies(data: Any) -> None:
        pass


__all__ = ["check_vocabularies"]
