"""Queues and their limits: batch queues, scheduling, admission and budgets.

Nothing here uses Ray, HTTP or tracing. Time is passed in as a clock.
"""
