"""``--precision auto``: what each layer loses in each number format, and the search for the
smallest or fastest assignment that keeps the budget.
"""
