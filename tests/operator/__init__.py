"""The operator against the API server that KUBECONFIG names; skipped where it names none.

No pod runs: the tests play the kubelet, and workers that answer the operator's calls.
"""
