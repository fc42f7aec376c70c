"""Tests on several ranks; a package, so that their processes find the tests' functions by name."""
