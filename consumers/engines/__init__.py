"""One module per engine. Engines are imported on use, because each drags in its own world."""

from __future__ import annotations

import importlib
from typing import Any

from broker.errors import EngineUnavailable
from consumers.engine import Engine

_ENGINES = {
    "embedded": ("consumers.engines.embedded", "EmbeddedEngine"),
    "simulated": ("consumers.engines.simulated", "SimulatedEngine"),
}
NAMES = tuple(_ENGINES)


def make_engine(name: str, options: dict[str, Any]) -> Engine:
    """An engine by name. Raises EngineUnavailable for an unknown name, option or package."""
    if name not in _ENGINES:
        raise EngineUnavailable(f"unknown engine: {name} (known: {', '.join(NAMES)})")
    module, attribute = _ENGINES[name]
    try:
        engine: Engine = getattr(importlib.import_module(module), attribute)(**options)
    except ImportError as error:
        raise EngineUnavailable(
            f"engine {name} is not installed ({error}): pip install 'tokenmq[{name}]'"
        ) from None
    except (TypeError, ValueError) as error:
        raise EngineUnavailable(f"engine {name}: {error}") from None
    return engine
