"""Who waits, who goes first and who is refused: batch queues, admission, budgets.

No Ray, no HTTP and no tracing; time is passed in as a clock.
"""
