"""Passes: from a global program to local ones, each step a small file."""
