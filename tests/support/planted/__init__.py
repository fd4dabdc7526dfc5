"""Faults that engines have had, planted into the steps of a small engine."""
