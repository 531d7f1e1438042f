"""Whole models measured."""
