"""Tests of lrmoe; a package, so that helpers import as ``tests.oracle`` without any setting."""
