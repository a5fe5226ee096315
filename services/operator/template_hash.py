"""Names the template of a resource's pods: the same as long as no pod has to be made anew.

Made from what the user wrote and not from the pods, so that a new version of the operator restarts
nobody. Neither counts, time limits, strategy nor how images are pulled are part of it.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from services.operator.resource import Resource
from services.operator.settings import SETTINGS

_PARTS = ("model", "servedName", "image", "resources", "dataPlaneTLS", "podTemplate")


def template_hash(resource: Resource) -> str:
    inputs: dict[str, Any] = {part: resource.spec.get(part) for part in _PARTS}
    inputs["gmanagerAddress"] = resource.gmanager_address
    for section, settings in SETTINGS.items():
        # What is at its default does not count: a later version may know more settings.
        inputs[section] = {
            name: value
            for name, value in resource.spec.get(section, {}).items()
            if name not in settings or value != settings[name].default
        }
    text = json.dumps(_canonical(inputs), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _canonical(value: Any) -> Any:
    """Nothing, empty and not there are the same; so are 0.2 and 200m."""
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    result = {}
    for key, item in value.items():
        is_amounts = key in ("limits", "requests") and isinstance(item, Mapping)
        canonical = _amounts(item) if is_amounts else _canonical(item)
        if canonical not in (None, "", {}, []):
            result[key] = canonical
    return result


def _amounts(amounts: Mapping[str, Any]) -> dict[str, str]:
    return {name: _amount(amount) for name, amount in amounts.items()}


def _amount(amount: Any) -> str:
    try:
        return str(parse_quantity(str(amount)).normalize())  # type: ignore[no-untyped-call]
    except ValueError:
        return str(amount)
