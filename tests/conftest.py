"""Triton decides at its first import whether to interpret its functions: before any test."""

import os

os.environ["TRITON_INTERPRET"] = "1"
