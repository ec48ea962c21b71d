"""Headrace serves large language models."""
