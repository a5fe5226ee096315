"""The Helm chart: rendered and checked with real programs, skipped where they are missing."""
