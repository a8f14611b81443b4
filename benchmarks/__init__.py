"""Comparisons with other engines; start the scripts beside this file."""
