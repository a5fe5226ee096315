"""Merges a user's pod template over the operator's, by the rules of Kubernetes' strategic merge.

Maps are merged by their keys, and null takes a key away; lists whose items have names are merged by
them, all other lists are replaced.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class _ListRule(NamedTuple):
    key: str
    """What names an item."""
    is_deep: bool
    """Whether an item of the same name is merged; otherwise it is replaced, because half of one
    and half of the other would be neither."""


_LISTS = {
    "containers": _ListRule("name", is_deep=True),
    "initContainers": _ListRule("name", is_deep=True),
    "volumes": _ListRule("name", is_deep=False),
    "env": _ListRule("name", is_deep=False),
    "volumeMounts": _ListRule("mountPath", is_deep=False),
    "ports": _ListRule("containerPort", is_deep=True),
    "imagePullSecrets": _ListRule("name", is_deep=False),
    "hostAliases": _ListRule("ip", is_deep=False),
    "topologySpreadConstraints": _ListRule("topologyKey", is_deep=False),
}


def merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge_value(key, merged.get(key), value)
    return merged


def _merge_value(key: str, base: Any, patch: Any) -> Any:
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        return merge(base, patch)
    if key in _LISTS and isinstance(base, list) and isinstance(patch, list):
        return _merge_lists(base, patch, _LISTS[key])
    return patch


def _merge_lists(base: Sequence[Any], patch: Sequence[Any], rule: _ListRule) -> list[Any]:
    merged = {item[rule.key]: item for item in base}
    nameless = []
    for item in patch:
        name = item.get(rule.key) if isinstance(item, Mapping) else None
        if not isinstance(name, str | int):
            nameless.append(item)  # the API server says what is wrong with it
        else:
            is_merged = rule.is_deep and name in merged
            merged[name] = merge(merged[name], item) if is_merged else item
    return [*merged.values(), *nameless]
