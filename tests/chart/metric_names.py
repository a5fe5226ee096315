"""Which metrics alerts, dashboard and autoscaler name; also checked on a cluster (`tests.e2e`)."""

import json
import re
from typing import Any

_NAME = re.compile(r"\binfinite_llm_\w+")


def named_metrics(objects: list[dict[str, Any]]) -> set[str]:
    texts = [
        rule["expr"]
        for item in objects
        if item["kind"] == "PrometheusRule"
        for group in item["spec"]["groups"]
        for rule in group["rules"]
    ]
    for item in objects:
        if item["kind"] == "ScaledObject":
            texts += [trigger["metadata"]["query"] for trigger in item["spec"]["triggers"]]
        if item["kind"] == "ConfigMap":
            dashboard = json.loads(item["data"]["infinite-llm.json"])
            texts += [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    return {name for text in texts for name in _NAME.findall(text)}
