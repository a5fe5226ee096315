"""`make e2e`: the chart on whatever cluster KUBECONFIG points at, as a person would use it."""
