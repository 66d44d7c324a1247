"""The version of DADT."""

VERSION = "0.1.0"
