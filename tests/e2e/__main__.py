"""`python -m tests.e2e [--short] [--steps a,b]`: the steps in order, one JSON object at the end."""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator

from tests.e2e import access, autoscaling, basic, changes
from tests.e2e.release import DEFAULT_IMAGE_BUILD, Release, Settings
from tests.e2e.tools import StepFailed, run

Step = Callable[[Release], None]


def short_form() -> dict[str, Step]:
    return {
        "images": basic.images,
        "install": basic.install,
        "chat": basic.chat_through_service,
        "borrow": basic.borrow,
        "scale": basic.scale_under_streams,
        "nothing_lent": basic.nothing_lent,
        "uninstall": basic.uninstall,
    }


def full_form(settings: Settings) -> dict[str, Step]:
    """Where the cluster lacks what a step needs, that is said and the step is left out."""
    short = short_form()
    optional: dict[str, tuple[Step, bool, str]] = {
        "ingress": (access.ingress, bool(settings.ingress_url), "INGRESS_URL"),
        "http_route": (access.http_route, bool(settings.gateway_url), "GATEWAY, GATEWAY_URL"),
        "grpc_route": (access.grpc_route, bool(settings.gateway_grpc), "GATEWAY, GATEWAY_GRPC"),
        "network_policy": (access.network_policy, settings.enforces_policies, "NETWORK_POLICY"),
        "hpa": (autoscaling.hpa, _has_api("v1beta1.metrics.k8s.io"), "a metrics server"),
        "keda": (autoscaling.keda, bool(settings.prometheus_address), "PROMETHEUS_ADDRESS"),
        "node_cut_off": (
            changes.node_cut_off,
            bool(settings.cut_node),
            "CUT_NODE",
        ),
    }
    steps: dict[str, Step] = {name: short[name] for name in ("images", "install")}
    steps |= {"helm_test": basic.helm_test, "chat": short["chat"], "borrow": short["borrow"]}
    steps |= {
        "metrics": basic.metrics,
        "scale": short["scale"],
        "upgrade_rollback": changes.upgrade_and_rollback,
    }
    steps |= {"pod_killed": changes.pod_killed, "rolling_update": changes.rolling_update}
    steps |= {"node_drained": changes.node_drained}
    for name, (step, can_run, needs) in optional.items():
        if can_run:
            steps[name] = step
        else:
            print(f"left out: {name} (needs {needs})")
    return steps | {name: short[name] for name in ("nothing_lent", "uninstall")}


def why_not(settings: Settings) -> str:
    """What is missing on this machine; empty if nothing is."""
    needed = ["kubectl", settings.helm]
    if settings.image_build == (DEFAULT_IMAGE_BUILD,):
        needed.append("docker")
    for program in needed:
        if shutil.which(program) is None:
            return f"no {program} on the PATH"
    try:
        run(["kubectl", "get", "--raw", "/readyz"], timeout_s=20.0)
    except StepFailed as error:
        return f"no cluster answers: {error}"
    return ""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make e2e", description=__doc__)
    parser.add_argument("--short", action="store_true", help="install, chat, borrow, scale")
    parser.add_argument("--steps", help="only these, separated by commas")
    options = parser.parse_args(arguments)
    settings = Settings.from_env(os.environ)
    if reason := why_not(settings):
        print(f"skipped: {reason}")
        return 0
    steps = short_form() if options.short else full_form(settings)
    if options.steps:
        steps = {name: steps[name] for name in options.steps.split(",")}
    seconds = dict(_run_all(Release(settings), steps))
    is_passed = list(seconds) == list(steps)
    print(json.dumps({"passed": is_passed, "total": round(sum(seconds.values()), 1), **seconds}))
    return 0 if is_passed else 1


def _run_all(release: Release, steps: dict[str, Step]) -> Iterator[tuple[str, float]]:
    """Ends at the first that fails."""
    for name, step in steps.items():
        print(f"{name} ...", flush=True)
        begun_s = time.monotonic()
        try:
            step(release)
        except Exception as error:
            print(f"{name} failed: {error}\n{_describe(release)}", flush=True)
            return
        duration_s = round(time.monotonic() - begun_s, 1)
        print(f"{name}: {duration_s} s", flush=True)
        yield name, duration_s


def _describe(release: Release) -> str:
    try:
        return basic.describe(release)
    except StepFailed as error:
        return str(error)


def _has_api(name: str) -> bool:
    try:
        return bool(run(["kubectl", "get", "apiservice", name, "-o", "name"], timeout_s=20.0))
    except StepFailed:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
