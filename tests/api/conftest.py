"""For tests of commands."""

from tests.m1.conftest import commands_built_once  # noqa: F401
