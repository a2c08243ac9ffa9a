"""Tests of the training job."""
