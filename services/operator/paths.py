"""Where the objects that the operator deals with lie in the API."""

from services.operator.resource import GROUP, PLURAL, VERSION, Key

_RESOURCES = f"/apis/{GROUP}/{VERSION}"


def resources(namespace: str | None = None) -> str:
    return f"{_RESOURCES}{_in(namespace)}/{PLURAL}"


def resource(key: Key) -> str:
    return f"{resources(key.namespace)}/{key.name}"


def status(key: Key) -> str:
    return f"{resource(key)}/status"


def pods(namespace: str | None = None) -> str:
    return f"/api/v1{_in(namespace)}/pods"


def pod(namespace: str, name: str) -> str:
    return f"{pods(namespace)}/{name}"


def events(namespace: str) -> str:
    return f"/api/v1{_in(namespace)}/events"


def leases(namespace: str) -> str:
    return f"/apis/coordination.k8s.io/v1{_in(namespace)}/leases"


def definition(name: str) -> str:
    return f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"


def _in(namespace: str | None) -> str:
    return "" if namespace is None else f"/namespaces/{namespace}"
